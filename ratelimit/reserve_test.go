package ratelimit_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func TestReserve(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)

	t.Run("OfFiveOutOfThreeOwesTwoAndSaysWhen", func(t *testing.T) {
		t.Parallel()
		runOnServer(t, pool, ratelimit.PerMinute(10), []step{
			{at: 0, take: 7, left: 3},
			{at: 0, reserve: 5, left: -2, wait: 12 * time.Second},
			{at: 0, take: 1, refused: true, left: -2, wait: 18 * time.Second},
			{at: 12 * time.Second, left: 0}, // the reserved work runs, and asks for nothing
			{at: 12 * time.Second, take: 1, refused: true, left: 0, wait: 6 * time.Second},
			{at: 18 * time.Second, take: 1, left: 0},
		})
	})
	t.Run("ServesALargeRequestBeforeTheSmallOnesThatFollow", func(t *testing.T) {
		t.Parallel()
		runOnServer(t, pool, ratelimit.PerSecond(10), []step{
			{at: 0, take: 10, left: 0},
			{at: 0, reserve: 10, left: -10, wait: time.Second},
			{at: 500 * time.Millisecond, take: 1, refused: true, left: -5, wait: 600 * time.Millisecond},
			{at: 500 * time.Millisecond, reserve: 1, left: -6, wait: 600 * time.Millisecond},
			{at: 1100 * time.Millisecond, take: 1, refused: true, left: 0, wait: 100 * time.Millisecond},
		})
	})
	t.Run("OfWhatIsThereIsReadyAtOnce", func(t *testing.T) {
		t.Parallel()
		runOnServer(t, pool, ratelimit.PerMinute(10), []step{
			{at: 0, reserve: 10, left: 0},
			{at: 0, reserve: 1, left: -1, wait: 6 * time.Second},
		})
	})
	t.Run("StopsAtMaxReserved", func(t *testing.T) {
		t.Parallel()
		runOnServer(t, pool, ratelimit.TokenBucket{Rate: 100, Period: time.Minute, MaxReserved: 50}, []step{
			{at: 0, take: 100, left: 0},
			{at: 0, reserve: 50, left: -50, wait: 30 * time.Second},
			{at: 0, reserve: 1, refused: true, left: -50, wait: 600 * time.Millisecond},
			{at: 600*time.Millisecond - time.Microsecond, reserve: 1, refused: true, left: -49 - 1e-4/60, wait: time.Microsecond},
			{at: 600 * time.Millisecond, reserve: 1, left: -50, wait: 30 * time.Second},
			{at: 600 * time.Millisecond, reserve: 151, wait: forever},
			{at: time.Hour, reserve: 150, left: -50, wait: 30 * time.Second},
		})
	})
	t.Run("OfMoreThanIsEverGivenIsAnErrorDownToTheLastBit", func(t *testing.T) {
		t.Parallel()
		limiter := newLimiter(t, pool, ratelimit.Config{})
		limit := ratelimit.Define("rounded", ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: 0.1, MaxReserved: 0.2})
		capacity, maxOwed := 0.1, 0.2
		_, err := limiter.Reserve(t.Context(), limit.For("a").Cost(capacity+maxOwed)) // which is above 0.3
		require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity)
		r, err := limiter.Reserve(t.Context(), limit.For("a").Cost(0.3))
		require.NoError(t, err)
		require.True(t, r.Allowed)
	})
	t.Run("OwesByDefaultWhatArrivesInACenturyOrTheMostThereIs", func(t *testing.T) {
		t.Parallel()
		limiter := newLimiter(t, pool, ratelimit.Config{})
		for i, c := range []struct {
			policy ratelimit.Policy
			most   float64
		}{
			{ratelimit.PerSecond(1), 1 + 36525*86400},
			{ratelimit.PerDay(0.5), 0.5 + 36525*0.5},
			{ratelimit.PerSecond(1e9), 1e9 + 1e12},
			{ratelimit.TokenBucket{Rate: 3, Period: ratelimit.Week, Capacity: ratelimit.None}, 3 * 36525.0 / 7},
			{ratelimit.FixedWindow{Rate: 2, Period: time.Hour, Capacity: 7, Start: opening}, 7 + 2*24*36525},
			{ratelimit.FixedWindow{Rate: 1, Period: century}, 2},
		} {
			request := ratelimit.Define("most", c.policy).For(fmt.Sprint(i))
			_, err := limiter.Reserve(t.Context(), request.Cost(c.most*(1+1e-9)))
			require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity, "%v", c.policy)
			r, err := limiter.Reserve(t.Context(), request.Cost(c.most*(1-1e-15)))
			require.NoError(t, err, "%v", c.policy)
			require.True(t, r.Allowed, "%v", c.policy)
		}
	})
	t.Run("OfWhatIsNoErrorIsGivenByAFullBucket", func(t *testing.T) {
		t.Parallel()
		limiter := newLimiter(t, pool, ratelimit.Config{})
		random, reserved := testsize.Rand(t), 0
		for i := range 300 {
			draw := func() float64 { return math.Pow(10, 6*random.Float64()-3) }
			capacity, maxOwed := draw(), draw()
			limit := ratelimit.Define("edge", ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: capacity, MaxReserved: maxOwed})
			cost := capacity + maxOwed
			if i%2 == 0 {
				cost = math.Nextafter(cost, 0)
			}
			r, err := limiter.Reserve(t.Context(), limit.For(fmt.Sprint(i)).Cost(cost))
			if err != nil {
				require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity, "%v of %v and %v", cost, capacity, maxOwed)
				continue
			}
			require.True(t, r.Allowed, "%v of %v and %v", cost, capacity, maxOwed)
			reserved++
		}
		require.Greater(t, reserved, 150)
	})
	t.Run("IsAnErrorWhereItIsForbidden", func(t *testing.T) {
		t.Parallel()
		runOnServer(t, pool, ratelimit.TokenBucket{Rate: 100, Period: time.Minute, MaxReserved: ratelimit.NoReservations}, []step{
			{at: 0, reserve: 1, wait: forever},
			{at: 0, take: 100, left: 0},
		})
	})
	t.Run("OfWhatIsThereAndNoMoreIfNothingMayBeOwed", func(t *testing.T) {
		t.Parallel()
		runOnServer(t, pool, ratelimit.TokenBucket{Rate: 100, Period: time.Minute, MaxReserved: ratelimit.None}, []step{
			{at: 0, reserve: 60, left: 40},
			{at: 0, reserve: 41, refused: true, left: 40, wait: 600 * time.Millisecond},
			{at: 0, reserve: 101, wait: forever},
			{at: 600 * time.Millisecond, reserve: 41, left: 0},
		})
	})
	t.Run("HasNoBoundByDefault", func(t *testing.T) {
		t.Parallel()
		runOnServer(t, pool, ratelimit.PerSecond(1), []step{
			{at: 0, reserve: 1_000_001, left: -1_000_000, wait: 1_000_000 * time.Second},
			{at: 1_000_000 * time.Second, take: 1, refused: true, left: 0, wait: time.Second},
		})
	})
}

// TestReserveThenIdle promises that after a reservation and a long idle time a bucket holds its capacity, and no more because of
// tokens owed before.
func TestReserveThenIdle(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)

	t.Run("OwingOneAndTenSecondsLeaveTwo", func(t *testing.T) {
		t.Parallel()
		runOnServer(t, pool, ratelimit.PerSecond(2), []step{
			{at: 0, take: 2, left: 0},
			{at: 0, reserve: 1, left: -1, wait: 500 * time.Millisecond},
			{at: 10 * time.Second, take: 1, left: 1},
			{at: 10 * time.Second, take: 1, left: 0},
			{at: 10 * time.Second, take: 1, refused: true, left: 0, wait: 500 * time.Millisecond},
		})
		runOnServer(t, pool, ratelimit.FixedWindow{Rate: 2, Period: time.Second, Start: opening}, []step{
			{at: 0, take: 2, left: 0},
			{at: 0, reserve: 1, left: -1, wait: time.Second},
			{at: 10 * time.Second, take: 1, left: 1},
			{at: 10 * time.Second, take: 1, left: 0},
			{at: 10 * time.Second, take: 1, refused: true, left: 0, wait: time.Second},
		})
	})
	t.Run("OwingAndAHundredIdlePeriodsLeaveACapacity", func(t *testing.T) {
		t.Parallel()
		now := opening
		limiter, err := ratelimit.New(pool, ratelimit.Config{AsOf: func() time.Time { return now }})
		require.NoError(t, err)
		request := ratelimit.Define("idle", ratelimit.PerSecond(10)).For("a")
		r, err := limiter.Reserve(t.Context(), request.Cost(11))
		require.NoError(t, err)
		require.True(t, r.Allowed)
		now = now.Add(100 * time.Second)
		value, err := limiter.Value(t.Context(), request)
		require.NoError(t, err)
		granted := 0
		for range 1000 {
			var d ratelimit.Decision
			if value, d = value.Take(now, 1); d.Allowed {
				granted++
			}
		}
		require.Equal(t, 10, granted)
	})
}

// TestNoCapacity is the limit that spaces requests: nothing is in store, so each is reserved and waits.
func TestNoCapacity(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)

	t.Run("SpacesRequestsByTheirCosts", func(t *testing.T) {
		t.Parallel()
		runOnServer(t, pool, ratelimit.TokenBucket{Rate: 60, Period: time.Minute, Capacity: ratelimit.None}, []step{
			{at: 0, reserve: 1, left: -1, wait: 1 * time.Second},
			{at: 0, reserve: 5, left: -6, wait: 6 * time.Second},
			{at: 0, reserve: 0.5, left: -6.5, wait: 6500 * time.Millisecond},
			{at: 6500 * time.Millisecond, left: 0},
			{at: time.Hour, left: 0}, // nothing is saved up
			{at: time.Hour, reserve: 1, left: -1, wait: time.Second},
		})
	})
	t.Run("GivesWindowsToTheWorkThatWaits", func(t *testing.T) {
		t.Parallel()
		runOnServer(t, pool, ratelimit.FixedWindow{Rate: 2, Period: time.Minute, Capacity: ratelimit.None, Start: opening}, []step{
			{at: 10 * time.Second, reserve: 1, left: -1, wait: 50 * time.Second},
			{at: 10 * time.Second, reserve: 1, left: -2, wait: 50 * time.Second},
			{at: 10 * time.Second, reserve: 1, left: -3, wait: 110 * time.Second},
			{at: time.Hour, left: 0},
		})
	})
	t.Run("LetsNothingBeTaken", func(t *testing.T) {
		t.Parallel()
		runOnServer(t, pool, ratelimit.TokenBucket{Rate: 60, Period: time.Minute, Capacity: ratelimit.None}, []step{
			{at: 0, take: 1, wait: forever},
			{at: time.Hour, take: 1e-9, wait: forever},
			{at: time.Hour, reserve: 1, left: -1, wait: time.Second},
		})
	})
}
