package docs_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The blocks of docs/recipes.md on tenants, workers and callers that wait, and the tests that run them.

var (
	Guarantee = ratelimit.Define("guarantee", ratelimit.PerSecond(20))
	Pool      = ratelimit.Define("pool", ratelimit.PerSecond(100))
)

func recipeBorrow(ctx context.Context, limiter *ratelimit.Limiter, tenant string) (ratelimit.Decision, error) {
	d, err := limiter.Take(ctx, ratelimit.Borrow(Guarantee.For(tenant), Pool.Global()))
	return d, err
}

var Mails = ratelimit.Define("mails", ratelimit.TokenBucket{Rate: 100, Period: time.Minute, Capacity: 10})

func recipeUpTo(ctx context.Context, limiter *ratelimit.Limiter, sender string, queue []string, send func(...string)) (time.Duration, error) {
	n, d, err := limiter.TakeUpTo(ctx, len(queue), Mails.For(sender))
	if err != nil {
		return 0, err
	}
	send(queue[:n]...)
	return d.RetryAfter, nil // 0 unless there was none
}

var Calls = ratelimit.Define("calls", ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 1})

func recipeWait(ctx context.Context, limiter *ratelimit.Limiter, call func() error) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	d, err := limiter.Wait(ctx, Calls.Global())
	if err != nil {
		return err
	}
	if !d.Allowed {
		return d.Err() // its turn would come too late, and nothing is reserved
	}
	return call()
}

var Firehose = ratelimit.Define("firehose", ratelimit.TokenBucket{
	Rate: 100_000, Period: time.Second, Capacity: 400_000, Prefetch: 500 * time.Millisecond,
})

func recipeHotKey(ctx context.Context, limiter *ratelimit.Limiter) (ratelimit.Decision, error) {
	d, err := limiter.Take(ctx, Firehose.Global())
	return d, err
}

// fetchCount counts how often tokens were prefetched.
type fetchCount int

func (n *fetchCount) Observe(_ context.Context, event ratelimit.Event) {
	if e, ok := event.(ratelimit.Prefetched); ok && e.Taken > 0 {
		*n++
	}
}

func TestRecipesOfVerbs(t *testing.T) {
	t.Parallel()
	testsize.Long(t, documents)

	t.Run("Borrow", func(t *testing.T) {
		t.Parallel()
		f := newFrozen(t)
		admitted := func(tenant string) (n int) {
			for ; ; n++ {
				d, err := recipeBorrow(t.Context(), f.Limiter, tenant)
				require.NoError(t, err)
				if !d.Allowed {
					return n
				}
			}
		}
		alone := admitted("acme")
		for _, tenant := range []string{"bolt", "core", "dyne", "echo"} {
			require.Equal(t, 20, admitted(tenant))
		}
		says(t, "A tenant that is alone gets %d at once. Each of four others then still has 20", alone)
		f.now = f.now.Add(time.Second)
		require.Equal(t, 20, admitted("acme"))
	})

	t.Run("HotKey", func(t *testing.T) {
		t.Parallel()
		f, fetches := newFrozen(t), fetchCount(0)
		f.Limiter = f.With(t, ratelimit.Config{AsOf: func() time.Time { return f.now }, Observer: &fetches})
		const calls = 100_000
		for range calls {
			d, err := recipeHotKey(t.Context(), f.Limiter)
			require.NoError(t, err)
			require.True(t, d.Allowed)
		}
		arrive := 400_000 - Firehose.Capacity()
		says(t, "The row holds %v, because %v arrive in half a second. Of the first %v calls %d queried it.", int(Firehose.Capacity()), int(arrive), calls, fetches+1)
		require.NoError(t, f.Limiter.Close(t.Context()))
		require.InDelta(t, Firehose.Capacity()-calls, f.Held(t, "firehose", ""), 0.01)
	})

	t.Run("UpTo", func(t *testing.T) {
		t.Parallel()
		f := newFrozen(t)
		queue, sent := make([]string, 25), 0
		poll := func() time.Duration {
			again, err := recipeUpTo(t.Context(), f.Limiter, "news", queue[sent:], func(mails ...string) { sent += len(mails) })
			require.NoError(t, err)
			return again
		}
		require.Zero(t, poll())
		first, again := sent, poll()
		require.Equal(t, first, sent)
		f.now = f.now.Add(again)
		require.Zero(t, poll())
		says(t, "Of 25 mails %d go at once, and the next is %s away", first, inSeconds(again))
		for begin := f.now; f.now.Sub(begin) < 7*time.Second; f.now = f.now.Add(time.Second) {
			poll()
		}
		says(t, "Polled each second, it sends another %d within six seconds", sent-first-1)
	})

	t.Run("Wait", func(t *testing.T) {
		t.Parallel()
		f := newFrozen(t)
		calls := 0
		call := func() error { calls++; return nil }
		require.NoError(t, recipeWait(t.Context(), f.Limiter, call))
		r, err := f.Limiter.Reserve(t.Context(), Calls.Global().Cost(50))
		require.NoError(t, err)
		require.True(t, r.Allowed)
		owed := f.tokens(t, Calls.Global())
		require.ErrorIs(t, recipeWait(t.Context(), f.Limiter, call), ratelimit.ErrLimited)
		require.Equal(t, owed, f.tokens(t, Calls.Global()))
		require.Equal(t, 1, calls)
		says(t, "If others have reserved %v s of work, the call is refused at once and reserves nothing", r.ReadyAt.Sub(f.now).Seconds())
	})
}
