package cli_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const accessLog = `10.0.0.1 - ada [22/Nov/2026:08:00:00 +0000] "GET /search?q=1 HTTP/1.1" 200 12 "-" "curl"
10.0.0.1 - ada [22/Nov/2026:08:00:00 +0000] "GET /search?q=2 HTTP/1.1" 200 12 "-" "curl"
10.0.0.2 - - [22/Nov/2026:08:00:01 +0000] "GET /search?q=2 HTTP/1.1" 200 12 "-" "curl"
10.0.0.1 - ada [22/Nov/2026:08:00:02 +0000] "GET /search?q=3 HTTP/1.1" 200 12 "-" "curl"
`

// report is what simulate prints.
type report struct {
	Format                   string
	Lines, Admitted, Refused int64
	Unlimited                int64
	Limits                   []struct {
		Limit          string
		Asked, Refused int64
	}
	Keys []struct {
		Limit, Key string
		Refused    int64
	}
	Unparsed, Failed struct{ Count int64 }
}

func TestSimulate(t *testing.T) {
	t.Parallel()
	f := &fixture{}
	rulesFile := file(t, "rules.yaml", "rules: [{limit: perAddress, rate: 2, period: minute}]")
	log := file(t, "access.log", accessLog)

	t.Run("SaysWhoWouldHaveBeenRefused", func(t *testing.T) {
		t.Parallel()
		refusals := filepath.Join(t.TempDir(), "refused.jsonl")
		r := f.run(t, "simulate", "-f", rulesFile, "--by", "address", "--refusals", refusals, log)
		require.Equal(t, 0, r.code, r.err)
		require.Contains(t, r.out, "refused   1")
		require.Contains(t, r.out, "perAddress  10.0.0.1  1        2026-11-22 08:00:02Z")
		lines, err := os.ReadFile(refusals)
		require.NoError(t, err)
		require.Equal(t, 1, strings.Count(string(lines), "\n"))
		var refused struct {
			Limit, Key, Source string
			Line               int64
		}
		require.NoError(t, json.Unmarshal(lines, &refused))
		require.Equal(t, int64(4), refused.Line)
		require.Equal(t, "10.0.0.1", refused.Key)
	})

	t.Run("ReadsStandardInput", func(t *testing.T) {
		t.Parallel()
		for _, more := range [][]string{nil, {"-"}} {
			r := run(t.Context(), nil, accessLog+"garbage\n", append([]string{"simulate", "--file", rulesFile, "--by", "user", "--format", "combined", "-o", "json"}, more...)...)
			require.Equal(t, 0, r.code, r.err)
			require.Contains(t, r.err, "1 line could not be read")
			require.Contains(t, r.err, "standard input:5:")
			require.NotContains(t, r.err, "garbage")
			var v report
			require.NoError(t, json.Unmarshal([]byte(r.out), &v))
			require.Equal(t, "combined", v.Format)
			require.Equal(t, int64(1), v.Unparsed.Count)
		}
	})

	t.Run("ReadsJSON", func(t *testing.T) {
		t.Parallel()
		log := file(t, "log.json", `{"when": "2026-11-22T08:00:00Z", "client": {"ip": "10.0.0.1"}, "tenant": "acme", "uri": "/items/7", "method": "GET"}
{"when": "2026-11-22T08:00:00Z", "client": {"ip": "10.0.0.2"}, "tenant": "acme", "uri": "/items/8", "method": "GET"}
{"when": "2026-11-22T08:00:01Z", "client": {"ip": "10.0.0.3"}, "tenant": "acme", "uri": "/items/9", "method": "GET"}
`)
		fields := []string{"--field", "time=when,address=client.ip", "--field", "path=uri"}
		v := read[report](t, f, 0, append([]string{"simulate", "-f", rulesFile, "--format", "json", "--by", "{tenant}", "--limit", "perAddress", log}, fields...)...)
		require.Equal(t, int64(1), v.Refused)
		v = read[report](t, f, 0, append([]string{"simulate", "-f", rulesFile, "--by", "address", "--ipv4-bits", "24", "--ipv6-bits", "48", "-n", "0", log}, fields...)...)
		require.Equal(t, int64(1), v.Refused, "they are of one network")
		require.Empty(t, v.Keys)
		v = read[report](t, f, 0, append([]string{"simulate", "-f", rulesFile, "--by", "{route}", "--route", "GET /items/{id}", "--top", "1", log}, fields...)...)
		require.Equal(t, int64(1), v.Refused, "they are of one route")
		require.Len(t, v.Keys, 1)
	})

	t.Run("APlanAndASecretCount", func(t *testing.T) {
		t.Parallel()
		plans := file(t, "rules.yaml", "rules: [{limit: a, rate: 2, period: minute}, {limit: a, plan: pro, rate: 20, period: minute}]")
		require.Equal(t, int64(1), read[report](t, f, 0, "simulate", "-f", plans, "--by", "address", log).Refused)
		require.Zero(t, read[report](t, f, 0, "simulate", "-f", plans, "--by", "address", "--plan", "pro", log).Refused)
		v := read[report](t, f, 0, "simulate", "-f", plans, "--by", "address", "--hash-key-file", file(t, "secret", "0123456789abcdef"), log)
		require.NotEqual(t, "10.0.0.1", v.Keys[0].Key)
	})

	t.Run("SaysWhatIsMissing", func(t *testing.T) {
		t.Parallel()
		require.Contains(t, f.fails(t, 2, "simulate", "-f", rulesFile, log), "give --by address")
		two := file(t, "two.yaml", "rules: [{limit: a, rate: 2, period: 1s}, {limit: b, rate: 3, period: 1s}]")
		require.Contains(t, f.fails(t, 2, "simulate", "-f", two, "--by", "address", log), `to ask by "address" a limit has to be named, as the rules have 2: a, b`)
		require.Contains(t, f.fails(t, 2, "simulate", "-f", rulesFile, "--by", "address", "--top", "-3", log), "--top is -3")
		require.Contains(t, f.fails(t, 2, "simulate", "-f", rulesFile, "--by", "address", "no-such.log"), "no-such.log")
		require.Equal(t, 2, f.run(t, "simulate", "-f", rulesFile, "--by", "address", "--format", "xml", log).code)
		require.Equal(t, 2, f.run(t, "simulate", "-f", rulesFile, "--by", "address", "--refusals", t.TempDir(), log).code)
		r := run(t.Context(), nil, "garbage\n", "simulate", "-f", rulesFile, "--by", "address")
		require.Equal(t, 1, r.code)
		require.Contains(t, r.err, "no line could be read")
	})
}

func TestPlayground(t *testing.T) {
	t.Parallel()
	page := (&fixture{}).ok(t, "playground")
	require.True(t, strings.HasPrefix(page, "<!doctype html>"))
	require.True(t, strings.HasSuffix(page, "</html>\n"))
}
