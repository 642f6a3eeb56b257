package simulate_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/simulate"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

// seen returns the instant and the attributes of a line, or the problem.
func seen(t testing.TB, config simulate.Config, line string) (at time.Time, attributes, problem string) {
	t.Helper()
	names := []string{"address", "user", "tenant", "plan", "route", "method", "path", "status", "size", "referer", "user_agent", "region", "masked_remote_address"}
	text := "match: all\nrules: [{limit: site, rate: 1, period: 1s}"
	for _, name := range names {
		text += fmt.Sprintf(", {limit: %s, rate: 1, period: week}", name)
	}
	text += "]\ntiers:\n  - {limit: site}\n"
	for _, name := range names {
		text += fmt.Sprintf("  - {limit: %[1]s, key: '{%[1]s}', when: {%[1]s: '*'}}\n", name)
	}
	config.Rules = document(t, text)
	found := make(map[string]string)
	config.Refused = func(r simulate.Refusal) error {
		at, found[r.Limit] = r.Time, r.Key
		return nil
	}
	report, err := simulate.Run(t.Context(), config, lines(line, line))
	if err != nil {
		require.ErrorIs(t, err, simulate.ErrUnreadable)
		return at, "", report.Unparsed.First[0].Reason
	}
	require.Zero(t, report.Failed.Count, "%v", report.Failed)
	require.Equal(t, found["address"] == "", found["masked_remote_address"] == "", "the address is Envoy's entry, too: %s", line)
	var said []string
	for _, name := range names {
		if value, ok := found[name]; ok && (name != "masked_remote_address" || value != found["address"]) {
			said = append(said, name+"="+value)
		}
	}
	return at, strings.Join(said, " "), ""
}

// TestFormats reads lines of testdata/formats.txt, all of noon, and compares their attributes with the file. -update
// writes them.
func TestFormats(t *testing.T) {
	t.Parallel()
	noon := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	text, err := os.ReadFile(filepath.Join("testdata", "formats.txt"))
	require.NoError(t, err)
	var found strings.Builder
	for line := range strings.SplitSeq(strings.TrimSpace(string(text)), "\n") {
		if strings.HasPrefix(line, "    ") { // the attributes of the line before
			continue
		}
		at, attributes, problem := seen(t, simulate.Config{}, line)
		require.Empty(t, problem, line)
		require.Equal(t, noon, at, line)
		fmt.Fprintf(&found, "%s\n    %s\n", line, strings.ReplaceAll(attributes, "\t", `\t`))
	}
	testkit.Golden(t, "formats.txt", found.String())
	for name, is := range map[string]struct {
		config simulate.Config
		line   string
		at     time.Time
		want   string
	}{
		"CommonAcrossMidnight": {
			line: `203.0.113.7 - - [01/Jan/2026:00:30:00 +0545] "GET / HTTP/2.0" 304 -`,
			at:   time.Date(2025, 12, 31, 18, 45, 0, 0, time.UTC),
			want: "address=203.0.113.7 route=GET / method=GET path=/ status=304",
		},
		"CommonOnLeapDay": {
			line: `203.0.113.7 - - [29/Feb/2028:12:00:00 +0000] "GET / HTTP/1.1" 304 -`,
			at:   time.Date(2028, 2, 29, 12, 0, 0, 0, time.UTC),
			want: "address=203.0.113.7 route=GET / method=GET path=/ status=304",
		},
		"CombinedOfLargeNetworks": {
			config: simulate.Config{IPv6Bits: 48},
			line:   `2001:db8::1 - - [01/Mar/2026:12:00:00 +0000] "GET /a HTTP/1.1" 201 1 "-" "-"`, at: noon,
			want: "address=2001:db8::/48 route=GET /a method=GET path=/a status=201 size=1",
		},
		"AddressesOfEnvoy": {
			config: simulate.Config{IPv6Bits: 48},
			line:   `{"time":"2026-03-01T12:00:00Z","remote_addr":"::ffff:203.0.113.7","region":"eu","masked_remote_address":"2001:db8::1/128"}`, at: noon,
			want: "address=203.0.113.7 route=- region=eu masked_remote_address=2001:db8::/48",
		},
		"WithRoutes": {
			config: simulate.Config{Routes: []string{"GET /items/{id}", "/static/"}},
			line:   `203.0.113.7 - - [01/Mar/2026:12:00:00 +0000] "GET /items/a%2Fb?x=1 HTTP/1.1" 200 1`, at: noon,
			want: "address=203.0.113.7 route=GET /items/{id} method=GET path=/items/a%2Fb status=200 size=1",
		},
		"WithRoutesThatDoNotMatch": {
			config: simulate.Config{Routes: []string{"GET /items/{id}", "/static/"}},
			line:   `203.0.113.7 - - [01/Mar/2026:12:00:00 +0000] "DELETE /items/1 HTTP/1.1" 200 1`, at: noon,
			want: "address=203.0.113.7 route=DELETE /items/1 method=DELETE path=/items/1 status=200 size=1",
		},
		"JSON": {
			line: `{"time":"2026-03-01T13:00:00.25+01:00","remote_addr":"203.0.113.7:5555","user":"ad\u0061","plan":"pro","tenant":"acme","method":"GET","path":"/a?x=1","status":200,"region":"eu"}`,
			at:   noon.Add(250 * time.Millisecond),
			want: "address=203.0.113.7 user=ada tenant=acme plan=pro route=GET /a method=GET path=/a status=200 region=eu",
		},
		"JSONOfCaddy": {
			line: `{"level":"info","ts":1772366400.125,"request":{"remote_ip":"203.0.113.7","method":"GET","uri":"/a?x"},"user_id":"","status":200,"size":7}`,
			at:   noon.Add(125 * time.Millisecond),
			want: "address=203.0.113.7 route=GET /a method=GET path=/a status=200 size=7",
		},
		"JSONOfGoogleCloud": {
			line: `{"httpRequest":{"requestMethod":"GET","requestUrl":"https://example.com/a?x","remoteIp":"203.0.113.7"},"timestamp":"2026-03-01T12:00:00.000001Z"}`,
			at:   noon.Add(time.Microsecond),
			want: "address=203.0.113.7 route=GET /a method=GET path=/a",
		},
		"JSONWithOtherNames": {
			config: simulate.Config{Fields: map[string]string{"time": "event.at", "address": "from", "user": "who.id", "region": "where", "route": "pattern"}},
			line:   `{"event":{"at":1772366400000},"from":"203.0.113.7","who":{"id":42},"where":true,"pattern":"GET /a/{b}","user":"x"}`, at: noon,
			want: "address=203.0.113.7 user=42 route=GET /a/{b} region=true",
		},
		"JSONInMicroseconds": {
			line: `{"@timestamp":1772366400000001,"ip":"203.0.113.7"}`,
			at:   noon.Add(time.Microsecond),
			want: "address=203.0.113.7 route=-",
		},
		"JSONInNanoseconds": {
			line: `{"ts":"1772366400000001000","client_ip":"203.0.113.7"}`,
			at:   noon.Add(time.Microsecond),
			want: "address=203.0.113.7 route=-",
		},
		"JSONWithoutZone": {
			line: `{"ts":"2026-03-01 12:00:00.5","url":"/a"}`,
			at:   noon.Add(time.Second / 2),
			want: "route=/a path=/a",
		},
	} {
		at, attributes, problem := seen(t, is.config, is.line)
		require.Empty(t, problem, name)
		require.Equal(t, is.want, attributes, name)
		require.Equal(t, is.at, at, name)
	}
}

func TestFormatsRefuse(t *testing.T) {
	t.Parallel()
	whole := `203.0.113.7 - - [01/Mar/2026:12:00:00 +0000] "GET / HTTP/1.1" 200 5 "-" "curl"`
	for _, line := range []string{
		"x", whole[:14], whole[:30], whole[:52], whole[:63], strings.Replace(whole, "Mar", "Mrz", 1),
		strings.Replace(whole, "Mar", "ebM", 1), strings.Replace(whole, "01/Mar", "31/Apr", 1),
		strings.Replace(whole, "01/Mar", "00/Mar", 1), strings.Replace(whole, "12:00", "24:00", 1),
		strings.Replace(whole, "+0000", "00000", 1), strings.Replace(whole, "200", "2x0", 1),
		`["2026-03-01T12:00:00Z"]`, `203.0.113.7 - - [2026-03-01T12:00:00+00:00] "GET / HTTP/1.1" 200 5`,
	} {
		_, _, problem := seen(t, simulate.Config{}, line)
		require.Contains(t, problem, "neither a JSON object nor in the Common Log Format", line)
	}
	for line, want := range map[string]string{
		`{"time":"2026-03-01T12:00:00Z"`:  "cut off",
		`{"at":1}`:                        "no field for the time; there may be time, ts, timestamp, @timestamp",
		`{"time":"noon"}`:                 "neither RFC 3339",
		`{"time":-1}`:                     "neither RFC 3339",
		`{"time":1e300}`:                  "neither RFC 3339",
		`{"time":"0000-01-01T00:00:00Z"}`: "neither RFC 3339",
	} {
		_, _, problem := seen(t, simulate.Config{}, line)
		require.Contains(t, problem, want, line)
	}
}

// A line with several addresses, or a host name, counts only for limits without an address.
func TestRunTakesOneAddress(t *testing.T) {
	t.Parallel()
	for line, says := range map[string]string{
		`client.example.com - - [01/Mar/2026:12:00:00 +0000] "GET / HTTP/1.1" 200 5`:                     "not one IP address",
		`203.0.113.7, 10.0.0.1 - - [01/Mar/2026:12:00:00 +0000] "GET / HTTP/1.1" 200 5`:                  "a list of addresses",
		`203.0.113.7, 10.0.0.2, 10.0.0.1 - - [01/Mar/2026:12:00:00 +0000] "GET / HTTP/1.1" 200 5`:        "a list of addresses",
		`{"time":"2026-03-01T12:00:00Z","remote_addr":"203.0.113.7,10.0.0.1","method":"GET","path":"/"}`: "a list of addresses",
	} {
		_, err := simulate.Run(t.Context(), simulate.Config{Rules: document(t, three), By: "address"}, lines(line))
		require.ErrorIs(t, err, simulate.ErrUnasked, line)
		require.ErrorContains(t, err, says)
		report := run(t, simulate.Config{Rules: document(t, three), By: "route"}, lines(line))
		require.EqualValues(t, 1, report.Admitted)
	}
}

// FuzzRun expects that the sums of a report agree for any log.
func FuzzRun(f *testing.F) {
	f.Add(at(0, "10.0.0.1", "GET /") + "\n" + at(9, "2001:db8::1", `POST /\x16`))
	f.Add(`{"time":"2026-03-01T12:00:00Z","remote_addr":"10.0.0.1","request":{"uri":"/a"}}`)
	f.Add("a b c [01/Mar/2026:12:00:00 +0000] [01/Mar/2026:12:00:00 +0000] \"\\")
	f.Add("\x1f\x8b\x08\x00\n\xef\xbb\xbf")
	f.Fuzz(func(t *testing.T, text string) {
		config := simulate.Config{
			Rules: document(t, `
match: all
rules: [{limit: a, rate: 1, period: 1s}, {limit: b, rate: 1, period: 1s, kind: fixed window, capacity: 2}]
tiers:
  - {limit: a, key: "{address}"}
  - {limit: b, key: "{route}:{user_agent}", route: "GET /a/{b}", cost_source: "query:n"}
`),
		}
		report, err := simulate.Run(t.Context(), config, lines(text))
		if err != nil && strings.HasPrefix(text, "\x1f\x8b") { // no gzip
			return
		}
		require.LessOrEqual(t, report.Lines, int64(strings.Count(text, "\n"))+1)
		require.Equal(t, report.Lines, report.Unparsed.Count+report.Failed.Count+report.Unlimited+report.Decided)
		require.Equal(t, report.Decided, report.Admitted+report.Refused)
		if err != nil && !errors.Is(err, simulate.ErrUnasked) {
			require.ErrorIs(t, err, simulate.ErrUnreadable)
		}
		for _, p := range append(report.Unparsed.First, report.Failed.First...) {
			require.LessOrEqual(t, len(p.Reason), 400)
		}
	})
}
