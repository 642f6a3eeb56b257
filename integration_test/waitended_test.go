package integration_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// If another caller ends the reservation of a sleeping Wait, the Wait learns it at its next check. It is not admitted if the tokens
// were returned, nor before its moment if they are paid. It still returns if its context ends meanwhile.
func TestWaitWhoseReservationSomebodyElseEnds(t *testing.T) {
	t.Parallel()
	type waiting struct {
		*bundle
		clock   *clock
		limiter *ratelimit.Limiter
		cancel  context.CancelFunc
		id      string
		done    chan error
	}
	limit := ratelimit.Define("drift", ratelimit.TokenBucket{Rate: 5, Period: time.Second, Capacity: 1})
	begin := func(t *testing.T) *waiting {
		t.Helper()
		w := &waiting{bundle: setup(t), clock: &clock{}, done: make(chan error, 1)}
		w.clock.set(clockNoon)
		w.limiter = w.with(t, ratelimit.Config{AsOf: w.clock.now})
		takeAll(t, w.limiter, limit.Global())
		var ctx context.Context
		ctx, w.cancel = context.WithCancel(t.Context())
		t.Cleanup(w.cancel)
		go func() {
			_, err := w.limiter.Wait(ctx, limit.Global())
			w.done <- err
		}()
		eventually(t, "it has reserved", func() bool { return len(w.reserved(t)) == 1 })
		require.NoError(t, w.pool.QueryRow(t.Context(), "SELECT id::text FROM ratelimit.reservations").Scan(&w.id))
		return w
	}
	asks := func(t *testing.T, w *waiting) {
		t.Helper()
		before := xact(t, w.bundle)
		eventually(t, "it asks, and sleeps on", func() bool { return xact(t, w.bundle) != before })
		select {
		case err := <-w.done:
			require.Fail(t, "it returned before its moment", "%v", err)
		default:
		}
	}
	t.Run("Cancelled", func(t *testing.T) {
		t.Parallel()
		w := begin(t)
		require.NoError(t, w.limiter.Cancel(t.Context(), w.id))
		err := <-w.done
		require.ErrorIs(t, err, ratelimit.ErrReservationEnded)
		require.ErrorContains(t, err, "it was cancelled")
		require.InDelta(t, 0, w.held(t, "drift", ""), 0.01)
	})
	t.Run("Settled", func(t *testing.T) {
		t.Parallel()
		w := begin(t)
		require.NoError(t, w.limiter.Settle(t.Context(), w.id))
		asks(t, w)
		w.clock.set(clockNoon.Add(200 * time.Millisecond))
		require.NoError(t, <-w.done)
		require.InDelta(t, -1, w.held(t, "drift", ""), 0.01, "it paid once")
	})
	t.Run("SettledAndGivenUp", func(t *testing.T) {
		t.Parallel()
		w := begin(t)
		require.NoError(t, w.limiter.Settle(t.Context(), w.id))
		asks(t, w)
		w.cancel()
		require.ErrorIs(t, <-w.done, context.Canceled)
		require.Equal(t, "settled", w.reserved(t)[0].State)
	})
	t.Run("Expired", func(t *testing.T) {
		t.Parallel()
		w := begin(t)
		w.clock.set(clockNoon.Add(time.Hour))
		_, err := w.limiter.Expire(t.Context())
		require.NoError(t, err)
		require.NoError(t, <-w.done, "by then there are tokens for it")
		require.Equal(t, "settled", w.reserved(t)[0].State)
	})
}
