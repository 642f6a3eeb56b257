package simulate_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/simulate"
)

// three holds 3 tokens a minute for each address.
const three = `rules: [{limit: address, rate: 3, period: minute}]`

// at returns a line of an address at a second of an hour.
func at(second int, address, request string) string {
	when := time.Date(2026, 3, 1, 12, 0, second, 0, time.UTC).Format("02/Jan/2006:15:04:05 -0700")
	return fmt.Sprintf(`%s - - [%s] "%s HTTP/1.1" 200 5 "-" "curl/8"`, address, when, request)
}

func second(n int) time.Time { return time.Date(2026, 3, 1, 12, 0, n, 0, time.UTC) }

func TestRun(t *testing.T) {
	t.Parallel()

	t.Run("ListsTheRefusalsWithTimes", func(t *testing.T) {
		t.Parallel()
		var refusals []simulate.Refusal
		report := run(t, simulate.Config{
			Rules: document(t, three), By: "address", Top: 10,
			Refused: func(r simulate.Refusal) error { refusals = append(refusals, r); return nil },
		}, lines(
			at(0, "10.0.0.1", "GET /"), at(0, "10.0.0.1", "GET /"), at(0, "10.0.0.2", "GET /"), at(1, "10.0.0.1", "GET /"),
			at(1, "10.0.0.1", "GET /"), at(2, "10.0.0.1", "GET /"), at(20, "10.0.0.1", "GET /"), "",
		))
		require.EqualValues(t, 7, report.Lines)
		require.EqualValues(t, 5, report.Admitted)
		require.Equal(t, []time.Time{second(0), second(20)}, []time.Time{report.From, report.To})
		require.Equal(t, 2, report.Buckets)
		require.Equal(t, []simulate.LimitReport{{
			Limit: "address", Asked: 7, Admitted: 5, Refused: 2, Share: 2.0 / 7, FirstRefusal: second(1), LastRefusal: second(2),
			Peak: simulate.Peak{At: second(0), Asked: 3},
		}}, report.Limits)
		require.Equal(t, []simulate.KeyReport{{"address", "10.0.0.1", 2, 0, second(1), second(2)}}, report.Keys)
		require.Len(t, refusals, 2)
		require.Equal(t, simulate.Refusal{
			Time: second(1), Limit: "address", Key: "10.0.0.1", Rule: "address", Cost: 1, RetryAfterUs: (19 * time.Second).Microseconds(),
			Source: "access.log", Line: 5,
		}, refusals[0])
		require.EqualValues(t, 18e6, refusals[1].RetryAfterUs)
	})

	t.Run("TakesFromAllLimitsOrFromNone", func(t *testing.T) {
		t.Parallel()
		report := run(t, simulate.Config{Rules: document(t, `
match: all
rules:
  - {limit: address, rate: 2, period: hour}
  - {limit: search, rate: 1, period: hour}
  - {limit: trial, rate: 1, period: hour, mode: shadow}
  - {limit: unused, rate: 1, period: hour, mode: off}
tiers:
  - {limit: address, key: "{address}"}
  - {limit: search, key: "{address}", route: "GET /search/{id}"}
  - {limit: trial}
  - {limit: unused}
`)}, lines(at(0, "10.0.0.1", "GET /search/1?x=y"), at(1, "10.0.0.1", "GET /search/2"), at(2, "10.0.0.1", "POST /search/2"), at(3, "10.0.0.1", "GET /")))
		require.EqualValues(t, 2, report.Refused, "the second by search, and took nothing from address; the fourth by address")
		counts := make(map[string][4]int64)
		for _, l := range report.Limits {
			counts[l.Limit] = [...]int64{l.Asked, l.Admitted, l.Refused, l.Shadow}
		}
		require.Equal(t, map[string][4]int64{
			"address": {4, 3, 1, 0}, "search": {2, 1, 1, 0}, "trial": {4, 1, 3, 3}, "unused": {0, 0, 0, 0},
		}, counts)
	})

	t.Run("DecidesByTheMostSpecificRule", func(t *testing.T) {
		t.Parallel()
		config := simulate.Config{Rules: document(t, `
match: all
rules:
  - {limit: user, rate: 1, period: hour}
  - {limit: user, rate: 2, period: hour, plan: pro}
overrides:
  - {limit: user, key: ada, multiplier: 4, until: 2026-03-01T12:00:30Z}
tiers:
  - {limit: user, key: "{user}"}
`)}
		var text []string
		for _, user := range []string{`"bob"`, `"eve","plan":"pro"`, `"ada"`, `"ada","plan":"pro"`} {
			for s := range 10 {
				text = append(text, fmt.Sprintf(`{"time":"2026-03-01T12:00:%02dZ","user":%s}`, s, user))
			}
		}
		text = append(text, `{"time":"2026-03-01T12:00:31Z","user":"ada"}`)
		refused := make(map[string]int)
		config.Refused = func(r simulate.Refusal) error { refused[r.Key+" by "+r.Rule]++; return nil }
		run(t, config, lines(text...))
		require.Equal(t, map[string]int{
			"bob by user": 9, "eve by user, plan pro": 8, "ada by user, override": 6 + 10, "ada by user": 1,
		}, refused, "ada has 4 tokens, which a plan does not fill up again, and neither does the end of the override")
	})

	t.Run("TakesTheCostThatALineStates", func(t *testing.T) {
		t.Parallel()
		config := simulate.Config{Rules: document(t, `
match: all
rules: [{limit: query, rate: 10, period: hour}, {limit: header, rate: 10, period: hour}]
tiers: [{limit: query, cost_source: "query:n"}, {limit: header, cost_source: "header:x-cost"}]
`)}
		var costs []float64
		config.Refused = func(r simulate.Refusal) error { costs = append(costs, r.Cost); return nil }
		run(t, config, lines(
			`{"time":"2026-03-01T12:00:00Z","path":"/?n=6","header:x-cost":"7"}`, `{"time":"2026-03-01T12:00:00Z","path":"/?n=5","header:x-cost":"4"}`,
			`{"time":"2026-03-01T12:00:00Z","path":"/?n=4"}`,
		))
		require.Equal(t, []float64{5, 4}, costs, "without a statement the cost is 1")
	})

	t.Run("CountsTheWorstKeysOnly", func(t *testing.T) {
		t.Parallel()
		var text []string
		for key := range 30 {
			for range 3 + key {
				text = append(text, at(key, fmt.Sprintf("10.0.0.%d", key), "GET /"))
			}
		}
		report := run(t, simulate.Config{Rules: document(t, three), By: "{address}", Top: 2}, lines(text...))
		require.Equal(t, []simulate.KeyReport{
			{"address", "10.0.0.29", 29, 0, second(29), second(29)}, {"address", "10.0.0.28", 28, 0, second(28), second(28)},
		}, report.Keys)
		report = run(t, simulate.Config{Rules: document(t, three), By: "address"}, lines(text...))
		require.Empty(t, report.Keys)
		require.Equal(t, simulate.Peak{At: second(29), Asked: 32, Refused: 29}, report.Limits[0].Peak)
	})

	t.Run("CountsTheBusiestSecondOfLogsInAnyOrder", func(t *testing.T) {
		t.Parallel()
		config := simulate.Config{Rules: document(t, three), By: "address"}
		var older []string
		for s := range 50 {
			older = append(older, strings.Replace(at(s, "10.0.0.1", "GET /"), "01/Mar", "28/Feb", 1))
		}
		newer := []string{at(7, "10.0.0.1", "GET /"), at(7, "10.0.0.1", "GET /"), at(5, "10.0.0.1", "GET /")} // which steps back
		report := run(t, config, lines(newer...), lines(older...))
		require.Equal(t, simulate.Peak{At: second(7), Asked: 2}, report.Limits[0].Peak)
		require.EqualValues(t, 1, report.OutOfOrder)
		require.Equal(t, second(7), report.To)
	})

	t.Run("ReportsLinesWhosePlanHasNoRule", func(t *testing.T) {
		t.Parallel()
		for rule, want := range map[string][]int64{", plan: pro": {2, 1}, "": {0, 0}} {
			report := run(t, simulate.Config{Rules: document(t, "rules: [{limit: a, rate: 9, period: hour}, {limit: b, rate: 9, period: hour"+rule+"}]\n"+
				"match: all\ntiers: [{limit: b}]")}, lines(`{"ts":1772366400,"plan":"pro"}`, `{"ts":1772366400,"plan":"por"}`, `{"ts":1}`, `{"ts":1}`))
			require.Equal(t, want, []int64{report.WithoutPlan, report.UnknownPlan}, rule)
		}
	})

	t.Run("CountsRefusalsInShadowOfAKey", func(t *testing.T) {
		t.Parallel()
		report := run(t, simulate.Config{By: "address", Top: 1, Rules: document(t, `rules: [{limit: address, rate: 1, period: hour, mode: shadow}]`)},
			lines(at(0, "10.0.0.1", "GET /"), at(1, "10.0.0.1", "GET /")))
		require.Equal(t, []simulate.KeyReport{{"address", "10.0.0.1", 1, 1, second(1), second(1)}}, report.Keys)
	})

	t.Run("CountsLinesThatNoLimitDecides", func(t *testing.T) {
		t.Parallel()
		ada := strings.Replace(at(0, "10.0.0.1", "GET /"), " - - ", " - ada ", 1)
		users := simulate.Config{Rules: document(t, `
match: all
rules: [{limit: user, rate: 1, period: hour}]
tiers: [{limit: user, key: "{user}", when: {user: "*"}}]
`)}
		report := run(t, users, lines(at(0, "10.0.0.1", "GET /"), ada))
		require.Equal(t, []int64{1, 1}, []int64{report.Unlimited, report.Admitted})
		_, err := simulate.Run(t.Context(), users, lines(at(0, "10.0.0.1", "GET /"), at(1, "10.0.0.1", "GET /")))
		require.ErrorIs(t, err, simulate.ErrUnasked)
		require.ErrorContains(t, err, "no tier fits any of 2 lines by its key, when and route; say the names of the JSON fields")

		byUser := simulate.Config{Rules: document(t, three), By: "user"}
		report = run(t, byUser, lines(at(0, "10.0.0.1", "GET /"), ada))
		require.EqualValues(t, 1, report.Failed.Count)
		require.Contains(t, report.Failed.First[0].Reason, `needs the attribute "user"`)
		_, err = simulate.Run(t.Context(), byUser, lines("x", at(0, "10.0.0.1", "GET /")))
		require.ErrorIs(t, err, simulate.ErrUnasked)
		require.ErrorContains(t, err, `line 2 of access.log: ratelimit: invalid key: the key of "address" needs the attribute "user"`)

		report, err = simulate.Run(t.Context(), simulate.Config{Rules: document(t, three), By: "address"}, lines("a", "b"))
		require.ErrorIs(t, err, simulate.ErrUnreadable)
		require.EqualValues(t, 2, report.Unparsed.Count)
		require.Zero(t, run(t, simulate.Config{Rules: document(t, three), By: "address"}, lines("", "")).Lines, "nothing is no failure")
	})

	t.Run("GoesOnAfterLinesThatCannotBeRead", func(t *testing.T) {
		t.Parallel()
		report := run(t, simulate.Config{Rules: document(t, three), By: "address"}, lines(
			"what is this", at(0, "10.0.0.1", "GET /"), "", strings.Repeat("x", 5<<20), at(1, "10.0.0.1", "GET /")[:40],
			strings.Repeat("y", 1<<20), at(1, "10.0.0.1", "GET /"+strings.Repeat("z", 1<<20)), "1", "2", "3",
		))
		require.EqualValues(t, 2, report.Admitted)
		require.EqualValues(t, 7, report.Unparsed.Count)
		require.Len(t, report.Unparsed.First, 5)
		require.Equal(t, simulate.Problem{"access.log", 4, "the line has more than 4194304 bytes"}, report.Unparsed.First[1])
	})
}

func TestRunReads(t *testing.T) {
	t.Parallel()
	config := simulate.Config{Rules: document(t, three), By: "address"}
	text := strings.Join([]string{at(0, "10.0.0.1", "GET /"), at(1, "10.0.0.1", "GET /"), ""}, "\r\n")
	var zipped bytes.Buffer
	for range 2 { // logs that were rotated and then put together
		w := gzip.NewWriter(&zipped)
		_, err := w.Write([]byte(text))
		require.NoError(t, err)
		require.NoError(t, w.Close())
	}

	t.Run("FilesAndStandardInputCompressedOrNot", func(t *testing.T) {
		t.Parallel()
		dir := t.TempDir()
		plain, packed := filepath.Join(dir, "access.log"), filepath.Join(dir, "access.log.1.gz")
		require.NoError(t, os.WriteFile(plain, []byte("\xef\xbb\xbf"+text), 0o600))
		require.NoError(t, os.WriteFile(packed, zipped.Bytes(), 0o600))
		var sources []simulate.Source
		for _, path := range []string{packed, plain} {
			source, err := simulate.File(path)
			require.NoError(t, err)
			sources = append(sources, source)
		}
		sources = append(sources, simulate.Reader("-", bytes.NewReader(zipped.Bytes())))
		report := run(t, config, sources...)
		require.EqualValues(t, 10, report.Lines)
		require.EqualValues(t, 7, report.Refused)
	})

	t.Run("UntilTheSourceFails", func(t *testing.T) {
		t.Parallel()
		report, err := simulate.Run(t.Context(), config, simulate.Reader("-", bytes.NewReader(zipped.Bytes()[:zipped.Len()-4])))
		require.ErrorIs(t, err, io.ErrUnexpectedEOF)
		require.Zero(t, report.Decided, "as earlier lines could follow")
		_, err = simulate.File(filepath.Join(t.TempDir(), "none"))
		require.ErrorIs(t, err, os.ErrNotExist)
		_, err = simulate.File(t.TempDir())
		require.ErrorContains(t, err, "is a directory")
	})

	t.Run("UntilTheContextEnds", func(t *testing.T) {
		t.Parallel()
		ctx, cancel := context.WithCancel(t.Context())
		config := config
		config.Refused = func(simulate.Refusal) error { cancel(); return nil }
		report, err := simulate.Run(ctx, config, lines(strings.Repeat(at(0, "10.0.0.1", "GET /")+"\n", 100_000)))
		require.ErrorIs(t, err, context.Canceled)
		require.Less(t, report.Lines, int64(10_000))
	})

	t.Run("UntilTheConsumerStops", func(t *testing.T) {
		t.Parallel()
		full := errors.New("the disk is full")
		config := config
		config.Refused = func(simulate.Refusal) error { return full }
		report, err := simulate.Run(t.Context(), config, lines(strings.Repeat(at(0, "10.0.0.1", "GET /")+"\n", 100)))
		require.ErrorIs(t, err, full)
		require.EqualValues(t, 1, report.Refused)
	})
}

func TestRunRejectsInvalidRequests(t *testing.T) {
	t.Parallel()
	tiers := "match: all\nrules: [{limit: a, rate: 1, period: 1s}]\ntiers: [{limit: a}]"
	for text, config := range map[string]simulate.Config{
		"no tiers": {Rules: document(t, three)},
		"a limit has to be named, as the rules have 2: a, b": {Rules: document(t, `rules: [{limit: a, rate: 1, period: 1s}, {limit: b, rate: 1, period: 1s}]`), By: "address"},
		"the limit \"a\" is named, and not by what":          {Rules: document(t, tiers), Limit: "a"},
		"no rule":                    {Rules: document(t, three), By: "address", Limit: "b"},
		"the Key":                    {Rules: document(t, three), By: "{address"},
		"33 bits of an IPv4 address": {Rules: document(t, tiers), IPv4Bits: 33},
		"-1 bits of an IPv6 address": {Rules: document(t, tiers), IPv6Bits: -1},
		"65 bits of an IPv6 address": {Rules: document(t, tiers), IPv6Bits: 65},
		"the route \"GET search\"":   {Rules: document(t, tiers), Routes: []string{"GET search"}},
		"HashKey has":                {Rules: document(t, tiers), HashKey: []byte("short")},
		"conflicts":                  {Rules: document(t, tiers), Routes: []string{"GET /{a}/x", "GET /{b}/x"}},
		"the window is -1ns":         {Rules: document(t, tiers), Window: -1},
		"the plan \"pro\"":           {Rules: document(t, tiers), Plan: "pro"},
		"no such rule":               {},
		`"jobs", which is of slots; a log does not say how long they are held`: {
			Rules: document(t, "match: all\nrules: [{limit: jobs, kind: concurrency, slots: 3}]\ntiers: [{limit: jobs, key: '{address}'}]"),
		},
	} {
		_, err := simulate.Run(t.Context(), config, lines(at(0, "10.0.0.1", "GET /")))
		require.ErrorIs(t, err, simulate.ErrInvalidConfig, text)
		if text != "no such rule" && text != "the Key" {
			require.ErrorContains(t, err, text)
		}
	}
	_, err := simulate.Run(t.Context(), simulate.Config{Rules: document(t, tiers)})
	require.ErrorContains(t, err, "there is no log")
}

func TestReportAsJSON(t *testing.T) {
	t.Parallel()
	report := run(t, simulate.Config{Rules: document(t, three), By: "address"},
		lines(at(5, "10.0.0.1", "GET /"), at(2, "10.0.0.1", "GET /")))
	text, err := json.Marshal(report)
	require.NoError(t, err)
	require.JSONEq(t, `{"from": "2026-03-01T12:00:02Z", "to": "2026-03-01T12:00:05Z", "lines": 2, "decided": 2,
		"admitted": 2, "refused": 0, "unlimited": 0, "buckets": 1, "without_plan": 0, "unknown_plan": 0, "out_of_order": 1, "step_back_us": 3000000, "keys": [],
		"limits": [{"limit": "address", "asked": 2, "admitted": 2, "refused": 0, "shadow": 0, "share": 0, "peak": {"at": "2026-03-01T12:00:02Z", "asked": 1, "refused": 0}}],
		"unparsed": {"count": 0, "first": []}, "failed": {"count": 0, "first": []}}`, string(text))
	text, err = json.Marshal(simulate.Refusal{Limit: "a", RetryAfterUs: 2e6})
	require.NoError(t, err)
	require.Contains(t, string(text), `"retry_after_us":2000000`)
}

// BenchmarkMillionLines replays 1,000,000 generated lines of 200,000 addresses. It reports the lines in a second:
//
//	go test ./cmd/ratelimit/internal/simulate -run xxx -bench MillionLines -benchtime 1x -benchmem -cpu 1
func BenchmarkMillionLines(b *testing.B) {
	one := simulate.Config{By: "address", Rules: document(b, `rules: [{limit: address, rate: 30, period: minute, capacity: 5}]`)}
	three := simulate.Config{Rules: document(b, `
match: all
rules:
  - {limit: address, rate: 30, period: minute, capacity: 5}
  - {limit: search, rate: 1, period: hour, kind: fixed window}
  - {limit: site, rate: 100000, period: second}
tiers:
  - {limit: address, key: "{address}"}
  - {limit: search, key: "{address}", route: GET /search}
  - {limit: site}
`)}
	b.Run("OneLimit", func(b *testing.B) { million(b, one, combined) })
	b.Run("ThreeLimits", func(b *testing.B) { million(b, three, combined) })
	b.Run("JSON", func(b *testing.B) {
		million(b, one, `{"remote_addr":"10.%d.%d.%d","time":"%s","method":"GET","uri":"/search?q=limits","status":200}`)
	})
}

const combined = `10.%d.%d.%d - - [%s] "GET /search?q=limits HTTP/1.1" 200 5 "-" "Mozilla/5.0 (X11)"`

// million replays lines of a form, 50 a second, each of one of 200,000 addresses.
func million(b *testing.B, config simulate.Config, form string) {
	b.Helper()
	const n = 1_000_000
	layout := time.RFC3339Nano
	if form == combined {
		layout = "02/Jan/2006:15:04:05 -0700"
	}
	var text bytes.Buffer
	for i := range n {
		host := rand.IntN(200_000)
		fmt.Fprintf(&text, form+"\n", host>>16, host>>8&255, host&255, second(i/50).Format(layout))
	}
	for b.Loop() {
		report := run(b, config, simulate.Reader("generated", bytes.NewReader(text.Bytes())))
		require.EqualValues(b, n, report.Decided)
	}
	b.ReportMetric(n*float64(b.N)/b.Elapsed().Seconds(), "lines/s")
}
