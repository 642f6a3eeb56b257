package ratelimit_test

import (
	"crypto/rand"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// opening is the start of every story. It is a multiple of minutes, hours and days since the Unix epoch. No story depends on that:
// windows that should start at opening say so.
var opening = at

// forever is the wait of a call that fails, because it can never be allowed.
const forever = time.Duration(math.MaxInt64)

// story is calls on one bucket that has no row at first.
type story struct {
	policy ratelimit.Policy
	steps  []step
}

// step is one call of a story, and its answer. A step that takes and reserves nothing reads the tokens.
type step struct {
	at      time.Duration // since opening; the clock may step back
	take    float64
	reserve float64
	refused bool
	left    float64       // the tokens of the bucket after the step
	wait    time.Duration // refused: until the same call is allowed. reserved: until the work may run
}

// TestStories makes the calls of each story on a server and in memory. The exact arithmetic of all policies, and of clocks that step
// back, is tested in integration_test/bucket.
func TestStories(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	for _, stories := range []map[string]story{storiesOfTokens(), storiesOfWindows(), storiesOfReservations()} {
		for name, s := range stories {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				s.run(t, pool)
				s.run(t, ratelimittest.NewDB())
			})
		}
	}
}

func (s story) run(t *testing.T, db ratelimit.Pool) {
	t.Helper()
	now, request := opening, ratelimit.Define("story", s.policy).For(rand.Text())
	limiter, err := ratelimit.New(db, ratelimit.Config{AsOf: func() time.Time { return now }})
	require.NoError(t, err)
	for i, step := range s.steps {
		now = opening.Add(step.at)
		step.run(t, i, limiter, request)
	}
}

func (s step) run(t *testing.T, i int, limiter *ratelimit.Limiter, request ratelimit.Request) {
	t.Helper()
	var r ratelimit.Reservation
	var err error
	switch {
	case s.reserve > 0:
		r, err = limiter.Reserve(t.Context(), request.Cost(s.reserve))
	case s.take > 0:
		r.Decision, err = limiter.Take(t.Context(), request.Cost(s.take))
	}
	if s.wait == forever {
		require.Error(t, err, "step %d at %v", i, s.at)
		return
	}
	require.NoError(t, err, "step %d at %v", i, s.at)
	require.InDelta(t, s.left, held(t, limiter, request), 1e-9, "step %d at %v: tokens left", i, s.at)
	if s.reserve+s.take == 0 {
		return
	}
	require.Equal(t, !s.refused, r.Allowed, "step %d at %v", i, s.at)
	require.InDelta(t, max(s.left, 0), r.Remaining, 1e-9, "step %d at %v: remaining", i, s.at)
	require.Equal(t, s.wait, r.RetryAfter+r.Delay(), "step %d at %v: wait", i, s.at)
}

func storiesOfTokens() map[string]story {
	return map[string]story{
		"ABurstThenOneEverySixSeconds": {ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3}, []step{
			{at: 0, take: 1, left: 2},
			{at: 0, take: 2, left: 0},
			{at: 0, take: 1, refused: true, left: 0, wait: 6 * time.Second},
			{at: 6*time.Second - time.Microsecond, take: 1, refused: true, left: 1 - 10.0/60e6, wait: time.Microsecond},
			{at: 6 * time.Second, take: 1, left: 0},
			{at: time.Hour, take: 3, left: 0}, // idle for an hour, and still no more than 3
			{at: time.Hour, take: 1, refused: true, left: 0, wait: 6 * time.Second},
		}},
		"CostsMayBeFractions": {ratelimit.TokenBucket{Rate: 40_000, Period: time.Minute, Capacity: 60_000}, []step{
			{at: 0, take: 60_000, left: 0},
			{at: 15 * time.Second, take: 2_500.25, left: 7_499.75},
			{at: 30 * time.Second, take: 20_000, refused: true, left: 17_499.75, wait: 3_750_375 * time.Microsecond},
			{at: 33_750_375 * time.Microsecond, take: 20_000, left: 0},
			{at: time.Hour, left: 60_000},
		}},
		"ARetryAMicrosecondTooEarlyIsRefused": {ratelimit.PerMinute(9), []step{ // 9.0 / 60e6 is no short number
			{at: 0, take: 9, left: 0},
			{at: 0, take: 3, refused: true, left: 0, wait: 20 * time.Second},
			{at: 20*time.Second - time.Microsecond, take: 3, refused: true, left: 3 - 9.0/60e6, wait: time.Microsecond},
			{at: 20 * time.Second, take: 3, left: 0},
		}},
		"AClockThatStepsBackCreditsNoInstantTwice": {ratelimit.PerMinute(10), []step{
			{at: 60 * time.Second, take: 4, left: 6},
			{at: 30 * time.Second, take: 6, left: 0},
			{at: 30 * time.Second, take: 1, refused: true, left: 0, wait: 36 * time.Second},
			{at: 66 * time.Second, take: 1, left: 0},
		}},
		"ARowOfAWrongClockCountsFromNow": {ratelimit.PerMinute(10), []step{
			{at: time.Hour, take: 8, left: 2},
			{at: 0, take: 1, left: 1},
			{at: 6 * time.Second, take: 2, left: 0},
			{at: 6 * time.Second, take: 1, refused: true, left: 0, wait: 6 * time.Second},
		}},
		"ACostAboveTheCapacityIsAnError": {ratelimit.PerHour(10), []step{
			{at: 0, take: 4, left: 6},
			{at: 0, take: 100, wait: forever},
			{at: 0, take: 6, left: 0},
		}},
	}
}

func storiesOfWindows() map[string]story {
	hourly := func(start time.Time) ratelimit.Policy {
		return ratelimit.FixedWindow{Rate: 5, Period: time.Hour, Start: start}
	}
	atTwenty := []step{
		{at: 0, take: 5, left: 0},
		{at: 0, take: 1, refused: true, left: 0, wait: 20 * time.Minute},
		{at: 20 * time.Minute, take: 5, left: 0},
		{at: 20 * time.Minute, take: 1, refused: true, left: 0, wait: time.Hour},
		{at: 80 * time.Minute, left: 5},
	}
	return map[string]story{
		"AllTokensAtTheStartOfEachWindow": {ratelimit.FixedWindow{Rate: 100, Period: time.Minute, Start: opening}, []step{
			{at: 10 * time.Second, take: 100, left: 0},
			{at: 10 * time.Second, take: 1, refused: true, left: 0, wait: 50 * time.Second},
			{at: time.Minute - time.Microsecond, take: 1, refused: true, left: 0, wait: time.Microsecond},
			{at: time.Minute, take: 1, left: 99}, // though the last call was ten seconds into its window
			{at: time.Hour, left: 100},
		}},
		"UnusedTokensRollOverUpToTheCapacity": {ratelimit.FixedWindow{Rate: 10, Period: time.Hour, Capacity: 25, Start: opening}, []step{
			{at: 0, take: 25, left: 0},
			{at: time.Hour, take: 4, left: 6},
			{at: 3 * time.Hour, left: 25},
			{at: 4 * time.Hour, take: 25, left: 0}, // a whole capacity in one window, and no more
			{at: 4*time.Hour + 59*time.Minute, take: 21, refused: true, left: 0, wait: 2*time.Hour + time.Minute},
			{at: 100 * time.Hour, take: 26, wait: forever},
		}},
		"AStartAfterTheCalls":    {hourly(opening.Add(72*time.Hour + 20*time.Minute)), atTwenty},
		"AStartBeforeTheCalls":   {hourly(opening.Add(-40 * time.Minute)), atTwenty},
		"AStartInYearOne":        {hourly(time.Date(1, 1, 1, 0, 20, 0, 0, time.UTC)), atTwenty},
		"AStartInYear9999":       {hourly(time.Date(9999, 12, 31, 0, 20, 0, 0, time.UTC)), atTwenty},
		"AStartAtALocalMidnight": {hourly(time.Date(2025, 7, 4, 0, 0, 0, 0, time.FixedZone("", -20*60))), atTwenty},
	}
}

func storiesOfReservations() map[string]story {
	return map[string]story{
		"LaterCallsWaitBehindAReservation": {ratelimit.PerSecond(10), []step{
			{at: 0, take: 7, left: 3},
			{at: 0, reserve: 13, left: -10, wait: time.Second},
			{at: 500 * time.Millisecond, take: 1, refused: true, left: -5, wait: 600 * time.Millisecond},
			{at: 500 * time.Millisecond, reserve: 1, left: -6, wait: 600 * time.Millisecond},
			{at: 1100 * time.Millisecond, take: 1, refused: true, left: 0, wait: 100 * time.Millisecond},
			{at: time.Hour, take: 10, left: 0}, // owed tokens are repaid once
			{at: time.Hour, take: 1, refused: true, left: 0, wait: 100 * time.Millisecond},
		}},
		"WindowsAheadPayForAReservation": {ratelimit.FixedWindow{Rate: 10, Period: time.Minute, Start: opening}, []step{
			{at: 30 * time.Second, reserve: 20, left: -10, wait: 30 * time.Second},
			{at: 30 * time.Second, reserve: 1, left: -11, wait: 90 * time.Second},
			{at: time.Minute, take: 1, refused: true, left: -1, wait: time.Minute},
			{at: 2 * time.Minute, take: 9, left: 0},
		}},
		"AReservationStopsAtMaxReserved": {ratelimit.TokenBucket{Rate: 100, Period: time.Minute, MaxReserved: 50}, []step{
			{at: 0, reserve: 150, left: -50, wait: 30 * time.Second},
			{at: 600*time.Millisecond - time.Microsecond, reserve: 1, refused: true, left: -49 - 1e-4/60, wait: time.Microsecond},
			{at: 600 * time.Millisecond, reserve: 1, left: -50, wait: 30 * time.Second},
			{at: time.Hour, reserve: 151, wait: forever},
		}},
		"TheLargestReservationIsExact": {ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: 0.1, MaxReserved: 0.2}, []step{
			{at: 0, reserve: 0.30000000000000004, wait: forever}, // the float64 sum of 0.1 and 0.2
			{at: 0, reserve: 0.3, left: -0.2, wait: 200 * time.Millisecond},
		}},
		"ReservationsMayBeForbidden": {ratelimit.TokenBucket{Rate: 100, Period: time.Minute, MaxReserved: ratelimit.NoReservations}, []step{
			{at: 0, reserve: 1, wait: forever},
			{at: 0, take: 100, left: 0},
		}},
		"AReservationMayBeOfAvailableTokensOnly": {ratelimit.TokenBucket{Rate: 100, Period: time.Minute, MaxReserved: ratelimit.None}, []step{
			{at: 0, reserve: 60, left: 40},
			{at: 0, reserve: 41, refused: true, left: 40, wait: 600 * time.Millisecond},
			{at: 0, reserve: 101, wait: forever},
		}},
		"WithoutACapacityRequestsAreSpaced": {ratelimit.TokenBucket{Rate: 60, Period: time.Minute, Capacity: ratelimit.None}, []step{
			{at: 0, take: 1e-9, wait: forever},
			{at: 0, reserve: 1, left: -1, wait: time.Second},
			{at: 0, reserve: 5.5, left: -6.5, wait: 6500 * time.Millisecond},
			{at: time.Hour, left: 0}, // nothing is saved up
			{at: time.Hour, reserve: 1, left: -1, wait: time.Second},
		}},
	}
}
