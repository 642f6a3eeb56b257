package ratelimit_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

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

// A call over several limits prefetches tokens of each.
func TestPrefetchOfSeveralLimits(t *testing.T) {
	t.Parallel()
	other := ratelimit.Define("other", still.Policy())
	synctest.Test(t, func(t *testing.T) {
		limiter := ratelimittest.New(t, nil)
		for prefetched := false; !prefetched; {
			d, err := limiter.Take(t.Context(), still.For("hot"), other.For("hot"))
			require.NoError(t, err)
			require.True(t, d.Allowed)
			prefetched = d.States[0].Prefetched && d.States[1].Prefetched
		}
	})
}

// lastDecided is an Observer that keeps the latest decision.
type lastDecided struct{ ratelimit.Decided }

func (l *lastDecided) Observe(_ context.Context, event ratelimit.Event) {
	if d, ok := event.(ratelimit.Decided); ok {
		l.Decided = d
	}
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
