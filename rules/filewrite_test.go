package rules_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// seeds are the files of testdata.
func seeds(t testing.TB) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join("testdata", "seeds", "*"))
	require.NoError(t, err)
	require.Len(t, names, 6)
	texts := make([]string, len(names))
	for i, name := range names {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		texts[i] = string(text)
	}
	return texts
}

func TestWrite(t *testing.T) {
	t.Parallel()
	require.Equal(t, `match: first
rules:
  - limit: enterprise
    kind: token bucket
    rate: 1000
    period: 1s
    capacity: 2000
  - limit: free
    kind: token bucket
    rate: 10
    period: 1s
    capacity: 20
tiers:
  - limit: enterprise
    key: "{header:x-api-key}"
    when:
      jwt:plan: enterprise
  - limit: free
    key: "{header:x-api-key}"
`, string(readSeed(t, "tiers.json").YAML()))
	require.Equal(t, `match: all
rules:
  - limit: global-rps
    kind: token bucket
    rate: 5
    period: 1s
    capacity: 10
tiers:
  - limit: global-rps
    key: "{address}"
`, string(readSeed(t, "globalrps.json").YAML()))
	require.Equal(t, "rules: []\n", string((&rules.Document{}).YAML()))
}

// requireRoundTrip writes a document, and reads it again.
func requireRoundTrip(t require.TestingT, d *rules.Document) {
	again, err := rules.Read(bytes.NewReader(d.YAML()))
	require.NoError(t, err, "%s", d.YAML())
	require.Equal(t, d, again, "%s", d.YAML())
}

func TestWriteIsRead(t *testing.T) {
	t.Parallel()
	for _, text := range seeds(t) {
		requireRoundTrip(t, read(t, text))
	}
	d := everythingSaid()
	d.Rules[0].Capacity = new(1e-9)
	d.Tiers.Tiers[0].DefaultCost = 1e-9
	requireRoundTrip(t, d)
}

// Any words and numbers that a document may hold are written so that they are read again.
func TestWriteAnythingIsRead(t *testing.T) {
	t.Parallel()
	words := rapid.OneOf(
		rapid.String().Filter(func(s string) bool { return !strings.Contains(s, "\x00") && len(s) < 500 }),
		rapid.SampledFrom([]string{
			"null", "~", "true", "no", "on", "1", "1e3", "0x1", ".inf", "-", "- a", "a: b", "a #b", "#a", " a ", "a\nb", "\t", "'", "\"", "\\", "{a}", "[", "*a",
			"&a", "!a", "%a", "@a", "|", ">", "?", ":", "a:", "\u2028", "\ufeff", "\U0001F600", "\u0085", "\x7f", "---", "...", "<<",
		}))
	amount := rapid.Custom(func(t *rapid.T) *float64 {
		if rapid.Bool().Draw(t, "none") {
			return nil
		}
		return new(rapid.Float64Range(1, 1000).Draw(t, "amount"))
	})
	rapid.Check(t, func(t *rapid.T) {
		d := &rules.Document{
			Rules: []rules.Rule{{
				Limit: "limit", Plan: rapid.StringMatching(`[A-Za-z0-9_.:/-]{0,64}`).Draw(t, "plan"),
				Kind: rapid.SampledFrom([]rules.Kind{"", rules.TokenBucket, rules.FixedWindow}).Draw(t, "kind"),
				Rate: rapid.Float64Range(1, 1000).Draw(t, "rate"), Period: time.Microsecond * time.Duration(rapid.Int64Range(1, 1e9).Draw(t, "period")),
				Capacity: amount.Draw(t, "capacity"), MaxReserved: amount.Draw(t, "max reserved"),
				Mode:     rapid.SampledFrom([]ratelimit.Mode{"", ratelimit.On, ratelimit.Shadow, ratelimit.Off}).Draw(t, "mode"),
				OnChange: rapid.SampledFrom([]ratelimit.OnChange{"", ratelimit.AddTokens}).Draw(t, "on change"),
				Unit:     rapid.StringN(0, 10, 64).Filter(func(s string) bool { return !strings.Contains(s, "\x00") }).Draw(t, "unit"), Description: words.Draw(t, "description"),
			}},
			Tiers: rules.TierSet{
				Match: rapid.SampledFrom([]rules.Match{rules.MatchAll, rules.MatchFirst}).Draw(t, "match"),
				Tiers: []rules.Tier{{Limit: "another", Endpoint: words.Draw(t, "endpoint"), When: map[string]string{"plan": words.Draw(t, "condition")}}},
			},
			Overrides: []rules.Override{{Limit: "limit", Key: rapid.StringN(0, 64, 256).Filter(func(s string) bool { return !strings.Contains(s, "\x00") }).Draw(t, "key"), Multiplier: 2}},
		}
		requireRoundTrip(t, d)
	})
}

// What is read can be used, and written, and then says the same. Nothing makes Read panic.
func FuzzRead(f *testing.F) {
	for _, text := range seeds(f) {
		f.Add(text)
	}
	f.Add(everything)
	f.Add("{match: all, rules: [], tiers: [{limit: a, key: '{user}|{x:y}', when: {a: b}}]}")
	f.Fuzz(func(t *testing.T, text string) {
		d, err := rules.Read(strings.NewReader(text))
		if err != nil {
			require.ErrorIs(t, err, rules.ErrInvalid)
			require.NotContains(t, err.Error(), "\n")
			return
		}
		requireRoundTrip(t, d)
		for _, rule := range d.Rules {
			_, err := ratelimit.NewLimit(rule.Limit, ratelimit.PerSecond(1))
			require.NoError(t, err)
		}
	})
}
