package ratelimit_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

func TestPrefetchIsChecked(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		policy ratelimit.Policy
		says   string
	}{
		"TooLong":  {ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 20, Prefetch: 1001 * time.Millisecond}, "must be 1s or less"},
		"TooShort": {ratelimit.TokenBucket{Rate: 10, Period: time.Second, Prefetch: time.Microsecond}, "from 1ms to 1h"},
		"BelowZero": {
			ratelimit.TokenBucket{Rate: 10, Period: time.Second, Prefetch: -time.Second}, "from 1ms to 1h",
		},
		"Nanoseconds": {ratelimit.TokenBucket{Rate: 10, Period: time.Second, Prefetch: 2*time.Millisecond + 1}, "whole microseconds"},
		"Shards":      {ratelimit.TokenBucket{Rate: 10, Period: time.Second, Shards: 2, Prefetch: 10 * time.Millisecond}, "use one of them"},
		"NoCapacity":  {ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: ratelimit.None, Prefetch: 10 * time.Millisecond}, "too long"},
		"Adaptive": {
			ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: 10, Period: time.Second, Prefetch: 10 * time.Millisecond}}, "cannot follow the price",
		},
	} {
		_, err := ratelimit.NewLimit("hot", test.policy)
		require.ErrorIs(t, err, ratelimit.ErrInvalidLimit, name)
		require.ErrorContains(t, err, test.says, name)
	}
	limit := ratelimit.Define("hot", ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 20, Prefetch: time.Second})
	require.InDelta(t, 10, limit.Capacity(), 0)
	require.Equal(t, "hot: 10 per second, capacity 20, prefetch 1s", limit.String())
}

func TestPrefetchOfWindowsIsChecked(t *testing.T) {
	t.Parallel()
	for says, policy := range map[string]ratelimit.Policy{
		"must be that or less":    ratelimit.FixedWindow{Rate: 10, Period: time.Second, Prefetch: 1001 * time.Millisecond},
		"from 1ms to 1h":          ratelimit.FixedWindow{Rate: 10, Period: time.Second, Prefetch: time.Microsecond},
		"use one of them":         ratelimit.FixedWindow{Rate: 10, Period: time.Second, Shards: 2, Prefetch: 10 * time.Millisecond},
		"the Capacity None":       ratelimit.FixedWindow{Rate: 10, Period: time.Second, Capacity: ratelimit.None, Prefetch: 10 * time.Millisecond},
		"cannot follow the price": ratelimit.Adaptive{Contract: ratelimit.FixedWindow{Rate: 10, Period: time.Second, Prefetch: 10 * time.Millisecond}},
	} {
		_, err := ratelimit.NewLimit("hot", policy)
		require.ErrorIs(t, err, ratelimit.ErrInvalidLimit)
		require.ErrorContains(t, err, says)
	}
	limit := ratelimit.Define("hot", ratelimit.FixedWindow{Rate: 10, Period: time.Second, Capacity: 20, Prefetch: time.Second})
	require.InDelta(t, 20, limit.Capacity(), 0)
	require.Equal(t, "hot: 10 per second, capacity 20 (fixed window), prefetch 1s", limit.String())
}

// still is a limit that gains next to nothing while a test runs.
var still = ratelimit.Define("still", ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: 10_000, Prefetch: 10 * time.Second})

// A limit that a rule names is answered from memory only until another policy holds.
func TestPrefetchEndsWithItsPolicy(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		change := time.Now().Add(3 * time.Second)
		less := ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: 100, Prefetch: 10 * time.Second}
		rule, err := ratelimit.NewRuling(still, ratelimit.RulingConfig{Name: "less", Eras: []ratelimit.Era{{}, {From: change, Policy: less}}})
		require.NoError(t, err)
		limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{Policies: modes{"still": rule}})
		require.NoError(t, err)
		prefetched := func() bool {
			d, err := limiter.Take(t.Context(), still.For("hot"))
			require.NoError(t, err)
			require.True(t, d.Allowed)
			return d.States[0].Prefetched
		}
		warm := func() { // takes until three calls in a row are answered from memory
			for n := 0; n < 3; n++ {
				if !prefetched() {
					n = -1
				}
			}
		}
		warm()
		time.Sleep(time.Until(change) - time.Millisecond)
		warm()
		time.Sleep(time.Millisecond)
		require.False(t, prefetched())
		require.NoError(t, limiter.Close(t.Context()))
	})
}

func TestPrefetchAndTheRefusalCache(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		last := &lastDecided{}
		limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{RefusalCache: 10, Observer: last})
		require.NoError(t, err)
		for last.Decision.States == nil || !last.Decision.States[0].Prefetched {
			_, err := limiter.Take(t.Context(), still.For("hot"))
			require.NoError(t, err)
		}
		for i := range 2 {
			d, err := limiter.Take(t.Context(), still.For("hot").Cost(9_999))
			require.NoError(t, err)
			require.False(t, d.Allowed)
			require.Equal(t, i == 1, last.Cached, "the second time it is refused from memory")
		}
		d, err := limiter.Take(t.Context(), still.For("hot"))
		require.NoError(t, err)
		require.True(t, d.Allowed)
		require.NoError(t, limiter.Close(t.Context()))
	})
}
