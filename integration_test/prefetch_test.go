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
	"github.com/pgratelimit/pgratelimit/ratelimit/prefetch"
)

// hotLimit is a limit that gains hardly any tokens during a test, so that the test can count admissions.
func hotLimit(name string, capacity float64) ratelimit.Limit {
	return ratelimit.Define(name, ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: capacity})
}

// Locked rows do not delay the prefetched tokens of other rows, which come back. Close returns what is left.
func TestPrefetchedTokensReturnDespiteLockedRows(t *testing.T) {
	t.Parallel()
	for name, setup := range map[string]func(*testing.T) *bundle{
		"Plain":    func(t *testing.T) *bundle { t.Helper(); return setup(t) },
		"Routed":   setupRouted,
		"InMemory": func(t *testing.T) *bundle { t.Helper(); return inMemory.setup(t) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const held, takes, free = 3, 100, "free" // each return may be the first call of a session, which is slow
			b, limit := setup(t), hotLimit("ahead", 1000)
			hot, err := prefetch.New(b.limiter, prefetch.Config{Limits: prefetch.Limits{limit: {For: time.Hour}}})
			require.NoError(t, err)
			keys := []string{free}
			for n := range held {
				keys = append(keys, fmt.Sprint("held", n))
			}
			for _, key := range keys {
				for range takes {
					require.NoError(t, hot.Require(t.Context(), limit.For(key)))
				}
				require.Less(t, b.held(t, "ahead", key), 1000.0-takes-1, "some are prefetched")
			}
			holder := b.begin(t, "")
			for _, key := range keys[1:] {
				_, err := b.limiter.WithTx(holder).Take(t.Context(), limit.For(key))
				require.NoError(t, err)
			}
			require.NoError(t, hot.Close(t.Context()))
			require.InDelta(t, 1000-takes, b.held(t, "ahead", free), 0.5)
			require.NoError(t, holder.Rollback(t.Context()))
			for _, key := range keys {
				require.Less(t, b.held(t, "ahead", key), 1000-takes+0.5, "nothing is returned twice")
			}
		})
	}
}

// With all verbs at once, no call waits for ever, also while both Limiters close.
func TestPrefetchWithEveryCallAtOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limiter := b.with(t, ratelimit.Config{RefusalCache: 100})
	limits := []ratelimit.Limit{hotLimit("at.once", 5000), hotLimit("at.once", 3000), hotLimit("at.once.too", 500)}
	kept := prefetch.Terms{For: time.Minute}
	hot, err := prefetch.New(limiter, prefetch.Config{Limits: prefetch.Limits{limits[0]: kept, limits[1]: kept, limits[2]: kept}})
	require.NoError(t, err)
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
				_, err = hot.Take(t.Context(), limits[0].For("0"), limits[2].For("1"))
			default:
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i%7+1)*10*time.Millisecond)
				_, err = hot.Take(ctx, request.Cost(float64(1+i%3)))
				cancel()
			}
			if calls.Add(1) == 2000 {
				closed.Go(func() { _ = hot.Close(t.Context()); _ = limiter.Close(t.Context()) })
			}
			if err != nil && !errors.Is(err, ratelimit.ErrClosed) && !errors.Is(err, context.DeadlineExceeded) {
				return err
			}
		}
		return nil
	}))
	closed.Wait()
	require.NoError(t, hot.Close(t.Context()))
	require.NoError(t, limiter.Close(t.Context()))
}
