package integration_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// hotLimit is a limit that gains hardly any tokens during a test, so that the test can count admissions.
func hotLimit(name string, capacity float64) ratelimit.Limit {
	return ratelimit.Define(name, ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: capacity, Prefetch: time.Minute})
}

// aheads is an Observer that adds up the prefetched tokens.
type aheads struct {
	mu                    sync.Mutex
	taken, returned, lost float64
	fetches               int
}

func (a *aheads) Observe(_ context.Context, event ratelimit.Event) {
	if e, ok := event.(ratelimit.Prefetched); ok {
		a.mu.Lock()
		a.taken, a.returned, a.lost = a.taken+e.Taken, a.returned+e.Returned, a.lost+e.Lost
		if e.Taken > 0 {
			a.fetches++
		}
		a.mu.Unlock()
	}
}

func TestPrefetch(t *testing.T) {
	t.Parallel()
	b := setup(t)

	// When there is nothing left the row decides, and says so.
	t.Run("TheEndIsExact", func(t *testing.T) {
		t.Parallel()
		limit := hotLimit("ends", 1000)
		limiter := b.with(t, ratelimit.Config{})
		admitted := 0
		for range 1100 {
			d, err := limiter.Take(t.Context(), limit.For("hot"))
			require.NoError(t, err)
			if !d.Allowed {
				require.False(t, d.States[0].Prefetched)
				require.Positive(t, d.RetryAfter)
				break
			}
			admitted++
		}
		require.Equal(t, int(limit.Capacity()), admitted)
	})

	t.Run("RemainingIsAnEstimateAndSaysSo", func(t *testing.T) {
		t.Parallel()
		limit := hotLimit("remaining", 1000)
		limiter := b.with(t, ratelimit.Config{})
		estimates := 0
		for n := range 100 {
			d, err := limiter.Take(t.Context(), limit.For("hot").Cost(2))
			require.NoError(t, err)
			require.InDelta(t, limit.Capacity()-2*float64(n+1), d.Remaining, 0.1)
			require.InDelta(t, 2*float64(n+1)*ratelimit.Day.Seconds(), d.ResetAfter.Seconds(), 0.1*ratelimit.Day.Seconds())
			if d.States[0].Prefetched {
				estimates++
			}
		}
		require.Greater(t, estimates, 80)
	})

	// Reset, Credit, Charge and Close return prefetched tokens to the row first.
	for name, change := range map[string]func(*ratelimit.Limiter, ratelimit.Request) error{
		"Reset":  func(l *ratelimit.Limiter, r ratelimit.Request) error { return l.Reset(t.Context(), r) },
		"Credit": func(l *ratelimit.Limiter, r ratelimit.Request) error { return l.Credit(t.Context(), r.Cost(10)) },
		"Charge": func(l *ratelimit.Limiter, r ratelimit.Request) error { return l.Charge(t.Context(), r.Cost(10)) },
		"Close":  func(l *ratelimit.Limiter, r ratelimit.Request) error { return l.Close(t.Context()) },
	} {
		t.Run(name+"GivesBack", func(t *testing.T) {
			t.Parallel()
			limit := hotLimit("change", 1000)
			limiter := b.with(t, ratelimit.Config{})
			request := limit.For(name)
			for range 100 {
				_, err := limiter.Take(t.Context(), request)
				require.NoError(t, err)
			}
			require.Less(t, b.held(t, "change", name), limit.Capacity()-101, "some is taken ahead")
			require.NoError(t, change(limiter, request))
			left := map[string]float64{"Reset": 100, "Credit": 10, "Charge": -10}[name] + limit.Capacity() - 100
			require.InDelta(t, left, b.held(t, "change", name), 1)
			if name == "Close" {
				_, err := limiter.Take(t.Context(), request)
				require.ErrorIs(t, err, ratelimit.ErrClosed)
			}
		})
	}

	t.Run("AnotherPolicyEndsIt", func(t *testing.T) {
		t.Parallel()
		limiter := b.with(t, ratelimit.Config{})
		limit := hotLimit("policy", 1000)
		for range 100 {
			_, err := limiter.Take(t.Context(), limit.For("hot"))
			require.NoError(t, err)
		}
		d, err := limiter.Take(t.Context(), hotLimit("policy", 500).For("hot"))
		require.NoError(t, err)
		require.False(t, d.States[0].Prefetched)
		require.NoError(t, limiter.Close(t.Context()))
		require.LessOrEqual(t, b.held(t, "policy", "hot"), 500.0, "what was given back does not exceed what it may hold")
	})

	t.Run("ATransactionGoesByTheRow", func(t *testing.T) {
		t.Parallel()
		limiter := b.with(t, ratelimit.Config{})
		limit := hotLimit("transaction", 1000)
		for range 100 {
			_, err := limiter.Take(t.Context(), limit.For("hot"))
			require.NoError(t, err)
		}
		before := b.held(t, "transaction", "hot")
		tx := b.begin(t, "")
		d, err := limiter.WithTx(tx).Take(t.Context(), limit.For("hot"))
		require.NoError(t, err)
		require.False(t, d.States[0].Prefetched)
		require.InDelta(t, before-1, d.Remaining, 0.1)
		require.NoError(t, tx.Rollback(t.Context()))
		require.InDelta(t, before, b.held(t, "transaction", "hot"), 0)
	})

	// With any concurrent calls, no call waits for ever, and no prefetched tokens remain after Close.
	t.Run("EverythingAtOnce", func(t *testing.T) {
		t.Parallel()
		limiter := b.with(t, ratelimit.Config{RefusalCache: 100})
		limits := []ratelimit.Limit{hotLimit("at.once", 5000), hotLimit("at.once", 3000), hotLimit("at.once.too", 500)}
		var calls atomic.Int64
		var closed sync.WaitGroup
		require.NoError(t, atonce.Do(8, func(n int) error {
			for i := range 300 {
				request := limits[(n+i)%3].For(fmt.Sprint(i % 2))
				var err error
				switch i % 50 {
				case 10:
					err = limiter.Reset(t.Context(), request)
				case 20:
					err = limiter.Charge(t.Context(), request.Cost(3))
				case 30:
					err = limiter.Credit(t.Context(), request.Cost(3))
				case 40:
					_, err = limiter.Take(t.Context(), limits[0].For("0"), limits[2].For("1"))
				default:
					ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i%7+1)*10*time.Millisecond)
					_, err = limiter.Take(ctx, request.Cost(float64(1+i%3)))
					cancel()
				}
				if calls.Add(1) == 2000 {
					closed.Go(func() { _ = limiter.Close(t.Context()) })
				}
				if err != nil && !errors.Is(err, ratelimit.ErrClosed) && !errors.Is(err, context.DeadlineExceeded) {
					return err
				}
			}
			return nil
		}))
		closed.Wait()
		require.NoError(t, limiter.Close(t.Context()))
	})
}

// Locked rows do not delay prefetched tokens of another row, and their own tokens come back when they are free.
func TestPrefetchComesBackPastRowsThatAreHeld(t *testing.T) {
	t.Parallel()
	for name, setup := range map[string]func(*testing.T) *bundle{
		"Plain":    func(t *testing.T) *bundle { t.Helper(); return setup(t) },
		"Routed":   setupRouted,
		"InMemory": func(t *testing.T) *bundle { t.Helper(); return inMemory.setup(t) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const held, takes, free = 8, 100, "free"
			b, now, told := setup(t), &clock{}, &aheads{}
			now.set(clockNoon)
			limit := ratelimit.Define("ahead", ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: 1000, Prefetch: time.Second})
			limiter := b.with(t, ratelimit.Config{AsOf: now.now, Observer: told})
			keys := []string{free}
			for n := range held {
				keys = append(keys, fmt.Sprint("held", n))
			}
			for _, key := range keys {
				for range takes {
					_, err := limiter.Take(t.Context(), limit.For(key))
					require.NoError(t, err)
				}
				require.Less(t, b.held(t, "ahead", key), limit.Capacity()-takes-1, "some is taken ahead")
			}
			holder := b.begin(t, "")
			for _, key := range keys[1:] {
				_, err := b.limiter.WithTx(holder).Take(t.Context(), limit.For(key))
				require.NoError(t, err)
			}
			now.set(now.now().Add(time.Second))
			comesBack := func(keys ...string) {
				for _, key := range keys {
					eventually(t, "the prefetched tokens come back", func() bool {
						now.set(now.now().Add(100 * time.Millisecond))
						return b.held(t, "ahead", key) > limit.Capacity()-takes-0.5
					})
				}
			}
			comesBack(free)
			require.NoError(t, holder.Rollback(t.Context()))
			comesBack(keys...)
			require.NoError(t, limiter.Close(t.Context()))
			require.Zero(t, told.lost)
		})
	}
}
