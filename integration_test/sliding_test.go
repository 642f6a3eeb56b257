package integration_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// slider is a window from which nothing falls out during a test.
var slider = ratelimit.Define("slider", ratelimit.SlidingWindow{Rate: 1e6, Period: ratelimit.Week})

// slidingDesk is a limiter with a clock of the test's own.
type slidingDesk struct {
	*ratelimit.Limiter
	now atomic.Int64
}

func (b *bundle) slidingDesk(t *testing.T, config ratelimit.Config) *slidingDesk {
	t.Helper()
	d := &slidingDesk{}
	d.at(0)
	config.AsOf = func() time.Time { return time.UnixMicro(d.now.Load()) }
	d.Limiter = b.with(t, config)
	return d
}

// at sets the clock to so much after noon.
func (d *slidingDesk) at(after time.Duration) { d.now.Store(clockNoon.Add(after).UnixMicro()) }

// tokens returns what the bucket holds.
func (d *slidingDesk) tokens(t *testing.T, request ratelimit.Request) float64 {
	t.Helper()
	v, err := d.Value(t.Context(), request)
	require.NoError(t, err)
	return v.Tokens
}

// requireTake takes and checks the answer. retryAfter is the expected wait; 0 means allowed.
func (d *slidingDesk) requireTake(t *testing.T, retryAfter time.Duration, requests ...ratelimit.Request) ratelimit.Decision {
	t.Helper()
	decision, err := d.Take(t.Context(), requests...)
	require.NoError(t, err)
	require.Equal(t, retryAfter, decision.RetryAfter, "%+v", decision)
	require.Equal(t, retryAfter == 0, decision.Allowed)
	return decision
}

// perMinute gives n in any minute, and counts in slices of 10 s.
func perMinute(name string, n float64) ratelimit.Limit {
	return ratelimit.Define(name, ratelimit.SlidingWindow{Rate: n, Period: time.Minute, Slices: 6})
}

func TestSlidingWindow(t *testing.T) {
	t.Parallel()
	b := setup(t)

	t.Run("GivesBackAPeriodAfterTheSlice", func(t *testing.T) {
		t.Parallel()
		d, limit := b.slidingDesk(t, ratelimit.Config{}), perMinute("gives", 10)
		d.requireTake(t, 0, limit.Global().Cost(6))
		d.at(15 * time.Second)
		decision := d.requireTake(t, 0, limit.Global().Cost(4))
		require.Zero(t, decision.Remaining)
		require.Equal(t, 65*time.Second, decision.ResetAfter)
		d.requireTake(t, 55*time.Second, limit.Global())
		d.at(70*time.Second - time.Microsecond)
		d.requireTake(t, time.Microsecond, limit.Global())
		d.at(70 * time.Second)
		decision = d.requireTake(t, 0, limit.Global())
		require.InDelta(t, 5, decision.Remaining, 0)
		d.requireTake(t, 10*time.Second, limit.Global().Cost(9))
		check, err := d.Check(t.Context(), limit.Global().Cost(5))
		require.NoError(t, err)
		require.True(t, check.Allowed)
		require.InDelta(t, 5, check.States[0].Value.Tokens, 0)
		require.InDelta(t, 9, check.States[0].Value.At(clockNoon.Add(80*time.Second)), 0)
	})

	t.Run("ARefusalIsNotCounted", func(t *testing.T) {
		t.Parallel()
		d, limit := b.slidingDesk(t, ratelimit.Config{}), perMinute("refuses", 3)
		d.requireTake(t, 0, limit.For("a").Cost(3))
		before := b.row(t, "refuses", "a")
		for range 50 {
			d.requireTake(t, 70*time.Second, limit.For("a"))
		}
		require.Equal(t, before, b.row(t, "refuses", "a"))
		d.at(70 * time.Second)
		d.requireTake(t, 0, limit.For("a").Cost(3))
	})

	t.Run("CreditsAndCharges", func(t *testing.T) {
		t.Parallel()
		ctx := t.Context()
		d, limit := b.slidingDesk(t, ratelimit.Config{}), perMinute("verbs", 10)
		request := limit.For("a")
		require.NoError(t, d.Credit(ctx, request.Cost(5)), "of a bucket that nobody has used")
		require.InDelta(t, 10, d.tokens(t, request), 0)
		first := d.requireTake(t, 0, request.Cost(4))
		d.at(20 * time.Second)
		d.requireTake(t, 0, request.Cost(6))
		require.NoError(t, d.CreditTaken(ctx, first.At, request.Cost(3)))
		require.InDelta(t, 3, d.tokens(t, request), 0)
		require.NoError(t, d.CreditTaken(ctx, first.At, request.Cost(9)), "more than was taken then")
		require.InDelta(t, 4, d.tokens(t, request), 0)
		require.NoError(t, d.Credit(ctx, request.Cost(2)))
		require.InDelta(t, 6, d.tokens(t, request), 0)
		require.NoError(t, d.Charge(ctx, request.Cost(20)))
		require.InDelta(t, -14, d.tokens(t, request), 0)
		d.requireTake(t, 70*time.Second, request)
		d.at(85 * time.Second)
		require.NoError(t, d.CreditTaken(ctx, first.At, request), "it has fallen out")
		require.InDelta(t, -14, d.tokens(t, request), 0)
		require.NoError(t, d.Reset(ctx, request))
		d.requireTake(t, 0, request.Cost(10))
		_, err := d.Reserve(ctx, request)
		require.ErrorIs(t, err, ratelimit.ErrNoReservations)
		require.ErrorContains(t, err, "call Take, and again after its RetryAfter")
		_, err = d.Take(ctx, request.Cost(11))
		require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity)
	})

	t.Run("AClockThatStepsBack", func(t *testing.T) {
		t.Parallel()
		d, limit := b.slidingDesk(t, ratelimit.Config{}), perMinute("back", 10)
		d.at(30 * time.Second)
		d.requireTake(t, 0, limit.Global().Cost(6))
		d.at(0)
		d.requireTake(t, 0, limit.Global().Cost(4))
		d.requireTake(t, 100*time.Second, limit.Global())
		d.at(100 * time.Second)
		d.requireTake(t, 0, limit.Global().Cost(10))
		d.at(-time.Hour) // what wrote the row was wrong
		d.requireTake(t, 70*time.Second, limit.Global())
		d.at(-time.Hour + 70*time.Second)
		d.requireTake(t, 0, limit.Global().Cost(10))
	})
}

// TestSlidingWindowIsPruned promises that Prune deletes full windows, and no others.
func TestSlidingWindowIsPruned(t *testing.T) {
	t.Parallel()
	onEach(t, testSlidingWindowIsPruned, onPostgres, inMemory, inPartitions)
}

func testSlidingWindowIsPruned(t *testing.T, on backend) {
	b := on.setup(t)
	d, limit := b.slidingDesk(t, ratelimit.Config{}), perMinute("pruned", 10)
	d.requireTake(t, 0, limit.For("a").Cost(10))
	lowered := perMinute("pruned", 1)
	for after := time.Duration(0); after < 3*time.Minute; after += 7 * time.Second {
		d.at(after)
		n, err := d.Prune(t.Context(), lowered)
		require.NoError(t, err)
		if after < 70*time.Second {
			require.Zero(t, n)
			require.InDelta(t, 0, d.tokens(t, limit.For("a")), 0)
			require.InDelta(t, -9, d.tokens(t, lowered.For("a")), 0)
		}
	}
	require.Empty(t, b.rows(t, "a"))
	require.InDelta(t, 10, d.tokens(t, limit.For("a")), 0)
}
