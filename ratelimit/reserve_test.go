package ratelimit

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestReserve(t *testing.T) {
	t.Parallel()

	t.Run("OfFiveOutOfThreeOwesTwoAndSaysWhen", func(t *testing.T) {
		t.Parallel()
		run(t, PerMinute(10), []step{
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
		run(t, PerSecond(10), []step{
			{at: 0, take: 10, left: 0},
			{at: 0, reserve: 10, left: -10, wait: time.Second},
			{at: 500 * time.Millisecond, take: 1, refused: true, left: -5, wait: 600 * time.Millisecond},
			{at: 500 * time.Millisecond, reserve: 1, left: -6, wait: 600 * time.Millisecond},
			{at: 1100 * time.Millisecond, take: 1, refused: true, left: 0, wait: 100 * time.Millisecond},
		})
	})
	t.Run("OfWhatIsThereIsReadyAtOnce", func(t *testing.T) {
		t.Parallel()
		run(t, PerMinute(10), []step{
			{at: 0, reserve: 10, left: 0},
			{at: 0, reserve: 1, left: -1, wait: 6 * time.Second},
		})
	})
	t.Run("StopsAtMaxReserved", func(t *testing.T) {
		t.Parallel()
		run(t, TokenBucket{Rate: 100, Period: time.Minute, MaxReserved: 50}, []step{
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
		limit := Define("rounded", TokenBucket{Rate: 1, Period: time.Second, Capacity: 0.1, MaxReserved: 0.2})
		for cost, want := range map[float64]error{0.3: nil, limit.terms.Capacity + limit.terms.MaxDebt: ErrCostExceedsCapacity} {
			_, err := new(Limiter).plan([]Request{limit.For("a").Cost(cost)}, true) // 0.1 + 0.2 is above 0.3
			require.ErrorIs(t, err, want)
		}
	})
	t.Run("IsAnErrorWhereItIsForbidden", func(t *testing.T) {
		t.Parallel()
		run(t, TokenBucket{Rate: 100, Period: time.Minute, MaxReserved: NoReservations}, []step{
			{at: 0, reserve: 1, wait: forever},
			{at: 0, take: 100, left: 0},
		})
	})
	t.Run("OfWhatIsThereAndNoMoreWithoutDebt", func(t *testing.T) {
		t.Parallel()
		run(t, TokenBucket{Rate: 100, Period: time.Minute, MaxReserved: NoDebt}, []step{
			{at: 0, reserve: 60, left: 40},
			{at: 0, reserve: 41, refused: true, left: 40, wait: 600 * time.Millisecond},
			{at: 0, reserve: 101, wait: forever},
			{at: 600 * time.Millisecond, reserve: 41, left: 0},
		})
	})
	t.Run("HasNoBoundByDefault", func(t *testing.T) {
		t.Parallel()
		run(t, PerSecond(1), []step{
			{at: 0, reserve: 1_000_001, left: -1_000_000, wait: 1_000_000 * time.Second},
			{at: 1_000_000 * time.Second, take: 1, refused: true, left: 0, wait: time.Second},
		})
	})
}

// TestReserveThenIdle holds a bucket to one clamp for debts and for refills: a debt must not make room
// for more than the capacity once it is repaid.
func TestReserveThenIdle(t *testing.T) {
	t.Parallel()

	t.Run("ADebtOfOneAndTenSecondsLeaveTwo", func(t *testing.T) {
		t.Parallel()
		run(t, PerSecond(2), []step{
			{at: 0, take: 2, left: 0},
			{at: 0, reserve: 1, left: -1, wait: 500 * time.Millisecond},
			{at: 10 * time.Second, take: 1, left: 1},
			{at: 10 * time.Second, take: 1, left: 0},
			{at: 10 * time.Second, take: 1, refused: true, left: 0, wait: 500 * time.Millisecond},
		})
		run(t, FixedWindow{Rate: 2, Period: time.Second, Start: opening}, []step{
			{at: 0, take: 2, left: 0},
			{at: 0, reserve: 1, left: -1, wait: time.Second},
			{at: 10 * time.Second, take: 1, left: 1},
			{at: 10 * time.Second, take: 1, left: 0},
			{at: 10 * time.Second, take: 1, refused: true, left: 0, wait: time.Second},
		})
	})
	t.Run("ADebtAndAHundredIdlePeriodsLeaveACapacity", func(t *testing.T) {
		t.Parallel()
		limit := Define("idle", PerSecond(10))
		now := opening.UnixMicro()
		row, allowed := limit.terms.Take(limit.terms.Full(now), now, 11, -limit.terms.MaxDebt)
		require.True(t, allowed)
		now += (100 * time.Second).Microseconds()
		granted := 0
		for range 1000 {
			if row, allowed = limit.terms.Take(row, now, 1, 0); allowed {
				granted++
			}
		}
		require.Equal(t, 10, granted)
	})
}

// TestNoCapacity is the limit that spaces requests: nothing is in store, so each is reserved and waits.
func TestNoCapacity(t *testing.T) {
	t.Parallel()

	t.Run("SpacesRequestsByTheirCosts", func(t *testing.T) {
		t.Parallel()
		run(t, TokenBucket{Rate: 60, Period: time.Minute, Capacity: NoCapacity}, []step{
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
		run(t, FixedWindow{Rate: 2, Period: time.Minute, Capacity: NoCapacity, Start: opening}, []step{
			{at: 10 * time.Second, reserve: 1, left: -1, wait: 50 * time.Second},
			{at: 10 * time.Second, reserve: 1, left: -2, wait: 50 * time.Second},
			{at: 10 * time.Second, reserve: 1, left: -3, wait: 110 * time.Second},
			{at: time.Hour, left: 0},
		})
	})
	t.Run("LetsNothingBeTaken", func(t *testing.T) {
		t.Parallel()
		run(t, TokenBucket{Rate: 60, Period: time.Minute, Capacity: NoCapacity}, []step{
			{at: 0, take: 1, wait: forever},
			{at: time.Hour, take: 1e-9, wait: forever},
			{at: time.Hour, reserve: 1, left: -1, wait: time.Second},
		})
	})
}
