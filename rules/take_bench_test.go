package rules_test

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// BenchmarkTake makes calls in turns without Policies, with a Set that has no rule for the limit, and with one that has. It
// reports the medians of the last two against that of the first.
func BenchmarkTake(b *testing.B) {
	f := setup(b)
	limit := ratelimit.Define("speedy", ratelimit.PerHour(1e9))
	_, err := f.store.Put(b.Context(), why, rules.Rule{Limit: "speedy", Policy: ratelimit.TokenBucket{Rate: 1e9, Period: time.Minute}})
	require.NoError(b, err)
	f.load(b)
	empty, err := rules.NewSet(f.pool, rules.Config{})
	require.NoError(b, err)
	var limiters []*ratelimit.Limiter
	for _, config := range []ratelimit.Config{{}, {Policies: empty}, {Policies: f.set}} {
		limiter, err := ratelimit.New(f.pool, config)
		require.NoError(b, err)
		limiters = append(limiters, limiter)
	}
	took := make([][]time.Duration, len(limiters))
	for b.Loop() {
		for i, limiter := range limiters {
			began := time.Now()
			_, err := limiter.Take(b.Context(), limit.Global())
			took[i] = append(took[i], time.Since(began))
			require.NoError(b, err)
		}
	}
	median := func(i int) float64 {
		slices.Sort(took[i])
		return float64(took[i][len(took[i])/2])
	}
	b.ReportMetric(median(1)/median(0), "no-rule/plain")
	b.ReportMetric(median(2)/median(0), "rule/plain")
}
