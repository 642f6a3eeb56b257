package rules_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// manyOverrides is how many overrides a set has to bear.
const manyOverrides = 100_000

// overrideMany gives so many keys an override, by hand.
func (f *fixture) overrideMany(t testing.TB, n int) {
	t.Helper()
	f.exec(t, `INSERT INTO ratelimit.rules (version, position, of, name, key, says, author, reason)
		SELECT 0, n, 'override', 'messages', 'customer-' || n, jsonb_build_object('multiplier', 1 + n % 10), 'ana', 'a test'
		FROM generate_series(1, $1::int) AS n`, n)
	f.exec(t, `INSERT INTO ratelimit.rules (version, position, of, name, key, says, author, reason)
		SELECT 0, -n, 'override', 'messages', 'partner-' || n, jsonb_build_object('policy', jsonb_build_object('rate', n, 'period', '1m')), 'ana', 'a test'
		FROM generate_series(1, $1::int / 10) AS n`, n)
}

// TestManyOverrides loads what is a lot: it may not take so much memory or time that nobody would.
func TestManyOverrides(t *testing.T) {
	t.Parallel()
	f := setup(t)
	applied, err := f.store.Put(t.Context(), why, perMinute("messages", "", 20), perMinute("messages", "pro", 50))
	require.NoError(t, err)
	many := testsize.Of(10_000, manyOverrides)
	f.overrideMany(t, many)
	f.load(t)
	require.Equal(t, many*11/10, f.events.last(t).Overrides)
	at := applied.From.Add(time.Hour)
	require.Equal(t, 100.0, f.capacity(t, at, messages.For("customer-14")))
	require.Equal(t, 250.0, f.capacity(t, at, messages.For("customer-14").Plan("pro")))
	require.Equal(t, 77.0, f.capacity(t, at, messages.For("partner-77")))
	for n := range 20_000 { // more than are remembered
		require.NotNil(t, f.set.RulingFor(messages, "", fmt.Sprint("customer-", n+1)))
	}
	require.LessOrEqual(t, len(f.set.RulingsOf("messages")), 64)
}

// BenchmarkRulingFor is what each decision pays.
func BenchmarkRulingFor(b *testing.B) {
	f := setup(b)
	_, err := f.store.Put(b.Context(), why, perMinute("messages", "", 20), perMinute("messages", "pro", 50), perMinute("logins", "", 5))
	require.NoError(b, err)
	f.overrideMany(b, manyOverrides)
	f.load(b)
	logins, other := ratelimit.Define("logins", ratelimit.PerMinute(5)), ratelimit.Define("other", ratelimit.PerMinute(5))
	for _, c := range []struct {
		name      string
		limit     ratelimit.Limit
		plan, key string
	}{
		{"NoRule", other, "", "ana"},
		{"Rule", logins, "", "ana"},
		{"RuleBesideOverrides", messages, "", "ana"},
		{"PlanBesideOverrides", messages, "pro", "ana"},
		{"Override", messages, "", "customer-77"},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				f.set.RulingFor(c.limit, c.plan, c.key)
			}
		})
	}
	b.Run("OverrideNotRemembered", func(b *testing.B) {
		keys := make([]string, manyOverrides)
		for i := range keys {
			keys[i] = fmt.Sprint("customer-", i+1)
		}
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			f.set.RulingFor(messages, "", keys[i%len(keys)])
		}
	})
}

// TestRulingForAllocatesNothing holds for each decision but the first of a limit, a plan or a key.
func TestRulingForAllocatesNothing(t *testing.T) { //nolint:paralleltest // testing.AllocsPerRun counts those of all goroutines
	f := setup(t)
	_, err := f.store.Put(t.Context(), why, perMinute("messages", "", 20), perMinute("messages", "pro", 50))
	require.NoError(t, err)
	_, err = f.store.Override(t.Context(), why, rules.Override{Limit: "messages", Key: "ana", Multiplier: 3})
	require.NoError(t, err)
	f.load(t)
	for _, key := range []string{"ana", "bob"} {
		for _, plan := range []string{"", "pro", "unknown"} {
			require.Zero(t, testing.AllocsPerRun(100, func() { f.set.RulingFor(messages, plan, key) }))
		}
	}
}
