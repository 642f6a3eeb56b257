package ratelimit_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func TestTokenBucket(t *testing.T) {
	t.Parallel()

	t.Run("FillsContinuouslyUpToItsCapacity", func(t *testing.T) {
		t.Parallel()
		run(t, ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 20}, []step{
			{at: 0, left: 20},
			{at: 1 * time.Second, take: 5, left: 15},
			{at: 5 * time.Second, left: 15 + 4.0/6},
			{at: 10 * time.Second, left: 16.5},
			{at: 60 * time.Second, left: 20},
		})
	})
	t.Run("GivesBackOneTokenEverySixSecondsAtTenAMinute", func(t *testing.T) {
		t.Parallel()
		run(t, ratelimit.PerMinute(10), []step{
			{at: 0, take: 5, left: 5},
			{at: 30 * time.Second, take: 10, left: 0}, // restored in half a minute
			{at: 36 * time.Second, take: 1, left: 0},
			{at: 66 * time.Second, take: 5, left: 0},
			{at: 126 * time.Second, take: 10, left: 0},
		})
	})
	t.Run("AllowsABurstThenOneEverySixSeconds", func(t *testing.T) {
		t.Parallel()
		run(t, ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3}, []step{
			{at: 0, take: 1, left: 2},
			{at: 0, take: 1, left: 1},
			{at: 0, take: 1, left: 0},
			{at: 0, take: 1, refused: true, left: 0, wait: 6 * time.Second},
			{at: 6*time.Second - time.Microsecond, take: 1, refused: true, left: 1 - 10.0/60e6, wait: time.Microsecond},
			{at: 6 * time.Second, take: 1, left: 0},
			{at: time.Hour, take: 3, left: 0}, // idle for an hour, and still no more than 3
			{at: time.Hour, take: 1, refused: true, left: 0, wait: 6 * time.Second},
		})
	})
	t.Run("LetsTenLoginsFailAtOnceThenOneEverySixMinutes", func(t *testing.T) {
		t.Parallel()
		run(t, ratelimit.PerHour(10), []step{
			{at: 0, take: 10, left: 0},
			{at: time.Minute, take: 1, refused: true, left: 1.0 / 6, wait: 5 * time.Minute},
			{at: 6 * time.Minute, take: 1, left: 0},
			{at: 7 * time.Minute, take: 1, refused: true, left: 1.0 / 6, wait: 5 * time.Minute},
			{at: 12 * time.Minute, take: 1, left: 0},
		})
	})
	t.Run("RefillsAsAParkingMeterDoes", func(t *testing.T) {
		t.Parallel()
		run(t, ratelimit.PerMinute(10), []step{ // ten quarters a minute, ten at most
			{at: 0, take: 10, left: 0},
			{at: 5 * time.Second, take: 1, refused: true, left: 5.0 / 6, wait: time.Second},
			{at: 6 * time.Second, take: 1, left: 0},
			{at: time.Hour, take: 10, left: 0},
			{at: time.Hour, take: 1, refused: true, left: 0, wait: 6 * time.Second},
		})
	})
}

func TestTokenBucketCosts(t *testing.T) {
	t.Parallel()

	t.Run("KeepsALargeTokenBudgetWithHeadroom", func(t *testing.T) {
		t.Parallel()
		run(t, ratelimit.TokenBucket{Rate: 40_000, Period: time.Minute, Capacity: 60_000}, []step{
			{at: 0, take: 60_000, left: 0},
			{at: 15 * time.Second, take: 2_500.25, left: 7_499.75}, // a prompt's length / 4 is a fraction
			{at: 30 * time.Second, take: 20_000, refused: true, left: 17_499.75, wait: 3_750_375 * time.Microsecond},
			{at: 33_750_375 * time.Microsecond, take: 20_000, left: 0},
			{at: time.Hour, left: 60_000},
		})
	})
	t.Run("PricesReadsAtHalfOneAndTwoTokens", func(t *testing.T) {
		t.Parallel()
		run(t, ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: 300}, []step{ // five minutes of unused rate
			{at: 0, take: 0.5, left: 299.5},
			{at: 0, take: 1, left: 298.5},
			{at: 0, take: 2, left: 296.5},
			{at: 0, take: 296.5, left: 0},
			{at: 0, take: 0.5, refused: true, left: 0, wait: 500 * time.Millisecond},
			{at: 300 * time.Second, take: 300, left: 0},
		})
	})
	t.Run("ARefusedLargeCostLeavesWhatIsThere", func(t *testing.T) {
		t.Parallel()
		run(t, ratelimit.PerHour(10), []step{
			{at: 0, take: 4, left: 6},
			{at: 0, take: 8, refused: true, left: 6, wait: 12 * time.Minute},
			{at: 0, take: 100, wait: forever},
			{at: 0, take: 6, left: 0},
		})
	})
}

func TestTokenBucketCapacity(t *testing.T) {
	t.Parallel()

	t.Run("BelowTheRateSpacesSmallRequests", func(t *testing.T) {
		t.Parallel()
		run(t, ratelimit.TokenBucket{Rate: 60, Period: time.Hour, Capacity: 10}, []step{ // 70 in the worst hour
			{at: 0, take: 10, left: 0},
			{at: 1 * time.Minute, take: 1, left: 0},
			{at: 2 * time.Minute, take: 1, left: 0},
			{at: 7 * time.Minute, take: 5, left: 0},
			{at: 12 * time.Minute, take: 5, left: 0},
			{at: 27 * time.Minute, left: 10}, // 15 minutes of nothing are worth 10
			{at: 27 * time.Minute, take: 11, wait: forever},
			{at: 27 * time.Minute, take: 10, left: 0},
		})
	})
	t.Run("AddsToTheRateInTheWorstPeriod", func(t *testing.T) {
		t.Parallel()
		limit := ratelimit.Define("worst", ratelimit.TokenBucket{Rate: 60, Period: time.Hour, Capacity: 10})
		require.Equal(t, 70, admitted(limit, every(1, 0, time.Hour+time.Second)))
	})
	t.Run("OfHalfAHardCapKeepsEveryPeriodUnderTheCap", func(t *testing.T) {
		t.Parallel()
		limit := ratelimit.Define("half", ratelimit.TokenBucket{Rate: 50, Period: time.Minute, Capacity: 50})
		require.Equal(t, 100, admitted(limit, every(10, 0, time.Minute+time.Second/10)))
	})
	t.Run("OfOneMakesAMeter", func(t *testing.T) {
		t.Parallel()
		run(t, ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 1}, []step{
			{at: 0, take: 1, left: 0},
			{at: 0, take: 1, refused: true, left: 0, wait: 100 * time.Millisecond},
			{at: 100 * time.Millisecond, take: 1, left: 0},
			{at: time.Minute, take: 1, left: 0},
			{at: time.Minute, take: 1, refused: true, left: 0, wait: 100 * time.Millisecond},
		})
	})
	t.Run("IsTheBurstAfterAnyIdleTime", func(t *testing.T) {
		t.Parallel()
		run(t, ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 10_000}, []step{
			{at: 0, take: 10_000, left: 0},
			{at: 1000 * time.Second, take: 10_000, left: 0},
			{at: 9000 * time.Second, take: 10_000, left: 0},
			{at: 9000 * time.Second, take: 1, refused: true, left: 0, wait: 100 * time.Millisecond},
		})
	})
}

// TestTokenBucketUnderLoad is the worked example of 10 tokens a second and 50 at most under 60 requests a second. Without the
// tokens that arrive during the burst, the 50 tokens last for 0.83 s. With them they last for 59 requests, because a token arrives
// with every sixth.
func TestTokenBucketUnderLoad(t *testing.T) {
	t.Parallel()
	limit := ratelimit.Define("load", ratelimit.TokenBucket{Rate: 10, Period: time.Second, Capacity: 50})

	t.Run("SpendsTheBurstInTheFirstSecond", func(t *testing.T) {
		t.Parallel()
		require.Equal(t, 59, admitted(limit, every(60, 0, 59*time.Second/60)))
		require.Equal(t, 59, admitted(limit, every(60, 0, time.Second)))
	})
	t.Run("ThenAdmitsOneInSix", func(t *testing.T) {
		t.Parallel()
		burst := admitted(limit, every(60, 0, time.Second))
		after := admitted(limit, every(60, 0, 101*time.Second)) - burst
		require.InDelta(t, 6000.0/6, after, 1)
	})
	t.Run("IsFullAgainAfterFiveIdleSeconds", func(t *testing.T) {
		t.Parallel()
		run(t, limit.Policy(), []step{
			{at: 0, take: 50, left: 0},
			{at: 0, take: 1, refused: true, left: 0, wait: 100 * time.Millisecond},
			{at: 5*time.Second - time.Microsecond, take: 50, refused: true, left: 50 - 1e-5, wait: time.Microsecond},
			{at: 5 * time.Second, take: 50, left: 0},
		})
	})
	t.Run("NeverAdmitsMoreThanBurstPlusRate", func(t *testing.T) {
		t.Parallel()
		count := admitted(limit, every(1000, 0, 10*time.Second+time.Second/1000))
		require.LessOrEqual(t, count, 50+10*10)
		require.GreaterOrEqual(t, count, 50+10*10-1) // rounding may delay the last token past the last instant
	})
}
