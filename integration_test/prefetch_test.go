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

// Locked rows do not delay prefetched tokens of another row, and their own tokens come back when they are free.
func TestPrefetchedTokensReturnDespiteLockedRows(t *testing.T) {
	t.Parallel()
	for name, setup := range map[string]func(*testing.T) *bundle{
		"Plain":    func(t *testing.T) *bundle { t.Helper(); return setup(t) },
		"Routed":   setupRouted,
		"InMemory": func(t *testing.T) *bundle { t.Helper(); return inMemory.setup(t) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const held, takes, free = 8, 100, "free"
			b, now, lost := setup(t), &clock{}, atomic.Bool{}
			now.set(clockNoon)
			limit := ratelimit.Define("ahead", ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: 1000, Prefetch: time.Second})
			limiter := b.with(t, ratelimit.Config{AsOf: now.now, Observer: observing(func(event ratelimit.Event) {
				if e, is := event.(ratelimit.Prefetched); is && e.Lost > 0 {
					lost.Store(true)
				}
			})})
			keys := []string{free}
			for n := range held {
				keys = append(keys, fmt.Sprint("held", n))
			}
			for _, key := range keys {
				for range takes {
					_, err := limiter.Take(t.Context(), limit.For(key))
					require.NoError(t, err)
				}
				require.Less(t, b.held(t, "ahead", key), limit.Capacity()-takes-1, "some are prefetched")
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
			require.False(t, lost.Load())
		})
	}
}

// Reset, Charge and Close return prefetched tokens to the row first.
func TestResetChargeAndCloseReturnPrefetchedTokens(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for name, test := range map[string]struct {
		call func(*ratelimit.Limiter, ratelimit.Request) error
		left float64
	}{
		"Reset":  {func(l *ratelimit.Limiter, r ratelimit.Request) error { return l.Reset(t.Context(), r) }, 1000},
		"Charge": {func(l *ratelimit.Limiter, r ratelimit.Request) error { return l.Charge(t.Context(), r.Cost(10)) }, 890},
		"Close":  {func(l *ratelimit.Limiter, _ ratelimit.Request) error { return l.Close(t.Context()) }, 900},
	} {
		limiter, request := b.with(t, ratelimit.Config{}), hotLimit("change", 1000).For(name)
		for range 100 {
			takeOne(t, limiter, request)
		}
		require.Less(t, b.held(t, "change", name), 899.0, "some are prefetched")
		require.NoError(t, test.call(limiter, request), name)
		require.InDelta(t, test.left, b.held(t, "change", name), 1, name)
	}
}

// With all verbs at once, no call waits for ever, also while the Limiter closes.
func TestPrefetchWithEveryCallAtOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
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
}
