package ratelimit_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// listener appends each event it receives to a list that several listeners share.
type listener struct {
	name  string
	heard *[]string
}

func (l *listener) Observe(_ context.Context, event ratelimit.Event) {
	*l.heard = append(*l.heard, l.name+" "+event.(ratelimit.Mended).Limit)
}

func TestObservers(t *testing.T) {
	t.Parallel()
	var heard []string
	first, second := &listener{"first", &heard}, &listener{"second", &heard}
	var none *listener

	ratelimit.Observers(nil, first, none, second).Observe(t.Context(), ratelimit.Mended{Limit: "uploads"})
	require.Equal(t, []string{"first uploads", "second uploads"}, heard)

	require.Same(t, second, ratelimit.Observers(nil, second), "one needs nobody in between")
	require.Nil(t, ratelimit.Observers(), "nobody is nobody, as in the zero Config")
	require.Nil(t, ratelimit.Observers(nil, none))
}

// broken is an Observer that counts some events and panics at each of them.
type broken struct {
	panicsAt func(ratelimit.Event) bool
	panicked atomic.Int64
}

func (b *broken) Observe(_ context.Context, event ratelimit.Event) {
	if b.panicsAt(event) {
		b.panicked.Add(1)
		panic("out of cheese")
	}
}

// An Observer that panics at each event of the background work ends neither the process nor that work.
func TestTheLimiterOutlivesAnObserverThatPanics(t *testing.T) {
	t.Parallel()
	hot := ratelimit.Define("hot", ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: 10_000, Prefetch: 10 * time.Second})
	window := ratelimit.Define("hot", ratelimit.FixedWindow{Rate: 10_000, Period: ratelimit.Day, Prefetch: 10 * time.Second})
	slot := ratelimit.Define("slot", ratelimit.Concurrency{Most: 1, Lease: 3 * time.Second})
	upstream := ratelimit.Define("upstream", ratelimit.Adaptive{Contract: ratelimit.PerSecond(100), Epoch: time.Second})
	prefetch := func(t *testing.T, limiter *ratelimit.Limiter) {
		t.Helper()
		for range 200 {
			require.NoError(t, limiter.Require(t.Context(), hot.For("key")))
		}
		time.Sleep(time.Minute) // meanwhile the Limiter returns unused tokens
	}
	prefetched := func(test func(ratelimit.Prefetched) bool) func(ratelimit.Event) bool {
		return func(e ratelimit.Event) bool { p, is := e.(ratelimit.Prefetched); return is && test(p) }
	}
	for name, test := range map[string]struct {
		panicsAt func(ratelimit.Event) bool
		act      func(t *testing.T, limiter *ratelimit.Limiter)
		panics   int64 // at least
	}{
		"TakenAhead": {prefetched(func(p ratelimit.Prefetched) bool { return p.Taken > 0 }), prefetch, 1},
		"GivenBack":  {prefetched(func(p ratelimit.Prefetched) bool { return p.Returned > 0 }), prefetch, 1},
		"Lost": {
			prefetched(func(p ratelimit.Prefetched) bool { return p.Lost > 0 }),
			func(t *testing.T, limiter *ratelimit.Limiter) {
				t.Helper()
				for kept := false; !kept; {
					d, err := limiter.Take(t.Context(), hot.For("key"))
					require.NoError(t, err)
					kept = d.States[0].Prefetched
				}
				for range 2 {
					require.NoError(t, limiter.Require(t.Context(), window.For("key")))
				}
			}, 1,
		},
		"Leased": {
			func(e ratelimit.Event) bool { _, is := e.(ratelimit.Leased); return is },
			func(t *testing.T, limiter *ratelimit.Limiter) {
				t.Helper()
				require.NoError(t, limiter.Hold(t.Context(), func(ctx context.Context, _ ratelimit.Lease) error {
					time.Sleep(10 * time.Second) // the lease is renewed each second
					return ctx.Err()
				}, slot.For("key")))
			}, 9 + 1, // one of the release
		},
		"PriceChanged": {
			func(e ratelimit.Event) bool { _, is := e.(ratelimit.PriceChanged); return is },
			func(t *testing.T, limiter *ratelimit.Limiter) {
				t.Helper()
				for range 30 {
					for range 100 {
						require.NoError(t, limiter.Report(t.Context(), upstream.For("key"), ratelimit.Outcome{Throttled: true}))
					}
					time.Sleep(time.Second)
				}
			}, 1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				observer := &broken{panicsAt: test.panicsAt}
				limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{Observer: observer})
				require.NoError(t, err)
				test.act(t, limiter)
				require.NoError(t, limiter.Close(t.Context()))
				require.GreaterOrEqual(t, observer.panicked.Load(), test.panics)
			})
		})
	}
}
