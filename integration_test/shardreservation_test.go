package integration_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// A policy's restrictions are the same on several rows.
func TestShardedReservationsKeepToTheirPolicy(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limiter, _ := b.stopped(t)
	policy := ratelimit.TokenBucket{Rate: 8, Period: time.Second, Shards: 8}
	define := func(name string, maxReserved float64) ratelimit.Limit {
		policy.MaxReserved = maxReserved
		return ratelimit.Define(name, policy)
	}
	_, err := limiter.Reserve(t.Context(), define("none", ratelimit.NoReservations).For("key"))
	require.ErrorIs(t, err, ratelimit.ErrNoReservations)

	unowed := define("unowed", ratelimit.None)
	_, err = limiter.Reserve(t.Context(), unowed.For("key").Cost(8.5))
	require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity)
	for _, cost := range []float64{1, 0.5, 5, 1.5} {
		r, err := limiter.Reserve(t.Context(), unowed.For("key").Cost(cost))
		require.NoError(t, err)
		require.True(t, r.Allowed)
		require.Zero(t, r.Delay())
	}
	r, err := limiter.Reserve(t.Context(), unowed.For("key").Cost(0.5))
	require.NoError(t, err)
	require.False(t, r.Allowed)
	require.Equal(t, 62500*time.Microsecond, r.RetryAfter)

	bounded := define("bounded", 4)
	for cost, delay := range map[float64]time.Duration{12: 500 * time.Millisecond} {
		r, err := limiter.Reserve(t.Context(), bounded.For("key").Cost(cost))
		require.NoError(t, err)
		require.True(t, r.Allowed)
		require.Equal(t, delay, r.Delay())
		require.Equal(t, -4.0, tokens(t, limiter, bounded.For("key")))
	}
	r, err = limiter.Reserve(t.Context(), bounded.For("key"))
	require.NoError(t, err)
	require.False(t, r.Allowed)
	require.Equal(t, 125*time.Millisecond, r.RetryAfter)
	_, err = limiter.Reserve(t.Context(), bounded.For("key").Cost(12.5))
	require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity)
}
