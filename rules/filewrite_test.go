package rules_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

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
