package ratelimit_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TestClockStepsBack is about a database clock that is set back: nothing that was there is lost, and no
// instant is credited twice.
func TestClockStepsBack(t *testing.T) {
	t.Parallel()

	t.Run("AFullBucketStaysFull", func(t *testing.T) {
		t.Parallel()
		for _, back := range []time.Duration{time.Millisecond, time.Minute} {
			run(t, ratelimit.PerMinute(10), []step{
				{at: 100 * time.Second, take: 1, left: 9},
				{at: 200 * time.Second, left: 10},
				{at: 200*time.Second - back, take: 10, left: 0},
			})
		}
	})
	t.Run("WhatIsLeftCanBeTaken", func(t *testing.T) {
		t.Parallel()
		run(t, ratelimit.PerMinute(10), []step{
			{at: 100 * time.Second, take: 4, left: 6},
			{at: 40 * time.Second, take: 6, left: 0},
			{at: 40 * time.Second, take: 1, refused: true, left: 0, wait: 66 * time.Second},
			{at: 106 * time.Second, take: 1, left: 0},
		})
	})
	t.Run("NoInstantIsCreditedTwice", func(t *testing.T) {
		t.Parallel()
		run(t, ratelimit.PerMinute(10), []step{
			{at: 60 * time.Second, take: 10, left: 0},
			{at: 30 * time.Second, take: 1, refused: true, left: 0, wait: 36 * time.Second},
			{at: 60 * time.Second, take: 1, refused: true, left: 0, wait: 6 * time.Second},
			{at: 66 * time.Second, take: 1, left: 0},
			{at: 6 * time.Second, take: 1, refused: true, left: 0, wait: 66 * time.Second},
			{at: 66 * time.Second, take: 1, refused: true, left: 0, wait: 6 * time.Second},
			{at: 72 * time.Second, take: 1, left: 0},
		})
	})
	t.Run("AWindowIsNeitherLostNorGivenTwice", func(t *testing.T) {
		t.Parallel()
		for _, back := range []time.Duration{time.Microsecond, time.Millisecond, time.Minute, time.Hour} {
			run(t, ratelimit.FixedWindow{Rate: 10, Period: time.Hour, Start: opening}, []step{
				{at: time.Hour - back, take: 1, left: 9},
				{at: time.Hour, take: 4, left: 6},
				{at: time.Hour - back, take: 5, left: 1}, // from the window that has begun once
				{at: time.Hour - back, take: 2, refused: true, left: 1, wait: time.Hour + back},
				{at: time.Hour, take: 2, refused: true, left: 1, wait: time.Hour},
				{at: 2 * time.Hour, take: 10, left: 0},
			})
		}
	})
	t.Run("OwedTokensAreNotDueSooner", func(t *testing.T) {
		t.Parallel()
		runOnServer(t, postgrestest.New(t), ratelimit.PerMinute(10), []step{
			{at: time.Minute, reserve: 12, left: -2, wait: 12 * time.Second},
			{at: 50 * time.Second, reserve: 1, left: -3, wait: 28 * time.Second},
			{at: 72 * time.Second, take: 1, refused: true, left: -1, wait: 12 * time.Second},
			{at: 78 * time.Second, left: 0},
		})
	})
	t.Run("AJitteringClockAdmitsNoMoreThanTime", func(t *testing.T) {
		t.Parallel()
		for _, policy := range []ratelimit.Policy{ratelimit.PerSecond(10), ratelimit.FixedWindow{Rate: 10, Period: time.Second, Start: opening}} {
			schedule := every(200, 0, 10*time.Second)
			for i := range schedule {
				schedule[i] += time.Duration((i*7919)%401-200) * time.Millisecond // within 200 ms of the time
			}
			limit := ratelimit.Define("jitter", policy)
			require.LessOrEqual(t, admitted(limit, schedule), 10+10*(10+1))
			require.GreaterOrEqual(t, admitted(limit, schedule), 10*10)
		}
	})
}

// TestClockWasAhead is about a row whose ts lies so far ahead that the clock that wrote it was wrong.
func TestClockWasAhead(t *testing.T) {
	t.Parallel()

	t.Run("UpToAMinuteTheBucketStandsStill", func(t *testing.T) {
		t.Parallel()
		run(t, ratelimit.PerMinute(10), []step{
			{at: time.Minute, take: 8, left: 2},
			{at: 0, take: 1, left: 1},
			{at: 59 * time.Second, left: 1},
			{at: 66 * time.Second, take: 2, left: 0},
		})
	})
	t.Run("BeyondAMinuteItComesBackWithoutCredit", func(t *testing.T) {
		t.Parallel()
		for _, ahead := range []time.Duration{time.Minute + time.Second, time.Hour, 1000 * ratelimit.Day} {
			run(t, ratelimit.PerMinute(10), []step{
				{at: ahead, take: 8, left: 2},
				{at: 0, take: 1, left: 1},
				{at: 6 * time.Second, take: 2, left: 0},
				{at: 6 * time.Second, take: 1, refused: true, left: 0, wait: 6 * time.Second},
			})
		}
	})
	t.Run("TheWaitOfARefusalCountsFromNow", func(t *testing.T) {
		t.Parallel()
		run(t, ratelimit.PerMinute(10), []step{
			{at: 1000 * ratelimit.Day, take: 10, left: 0},
			{at: 0, take: 1, refused: true, left: 0, wait: 6 * time.Second},
		})
		run(t, ratelimit.FixedWindow{Rate: 10, Period: time.Hour, Start: opening}, []step{
			{at: 1000 * ratelimit.Day, take: 10, left: 0},
			{at: 15 * time.Minute, take: 1, refused: true, left: 0, wait: 45 * time.Minute},
		})
	})
	t.Run("AWindowOfTheNearFutureIsTrusted", func(t *testing.T) {
		t.Parallel()
		run(t, ratelimit.FixedWindow{Rate: 10, Period: time.Hour, Start: opening}, []step{
			{at: time.Hour, take: 8, left: 2},
			{at: 0, take: 1, left: 1}, // an hour back: the next window's row, whose start a minute's error could reach
			{at: time.Hour, take: 2, refused: true, left: 1, wait: time.Hour},
		})
		run(t, ratelimit.FixedWindow{Rate: 10, Period: time.Hour, Start: opening}, []step{
			{at: 2 * time.Hour, take: 8, left: 2},
			{at: 0, take: 1, left: 1}, // the window after the next: a wrong clock, corrected
			{at: time.Hour, take: 10, left: 0},
		})
	})
}

// TestPolicyChanges changes the definition of a limit in the code while its row stays. The code does not say since when it is
// changed; a rule of Config.Policies does.
func TestPolicyChanges(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)

	t.Run("ANewRateCountsFromTheLastTake", func(t *testing.T) {
		t.Parallel()
		// The row does not say under which rate the time since has passed, so all of it counts at the new one.
		runOnServer(t, pool, ratelimit.PerMinute(10), []step{
			{at: 0, take: 10, left: 0},
			{at: 30 * time.Second, left: 5},
			{at: 30 * time.Second, policy: ratelimit.PerMinute(1000), left: 500},
		})
		runOnServer(t, pool, ratelimit.PerMinute(1000), []step{
			{at: 0, take: 1000, left: 0},
			{at: 30 * time.Second, policy: ratelimit.PerMinute(10), left: 5},
		})
	})
	t.Run("AStoredRateCountsFromItsInstant", func(t *testing.T) {
		t.Parallel()
		// Half a minute at the rate before, and a second at the one after it.
		for name, test := range map[string]struct{ before, after, left float64 }{
			"raised": {10, 1000, 5 + 1000.0/60}, "lowered": {1000, 10, 10},
		} {
			limit := ratelimit.Define("stored."+name, ratelimit.PerMinute(test.before))
			rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Eras: []ratelimit.Era{
				{}, {From: opening.Add(30 * time.Second), Policy: ratelimit.PerMinute(test.after)},
			}})
			require.NoError(t, err)
			now := opening
			limiter, err := ratelimit.New(pool, ratelimit.Config{AsOf: func() time.Time { return now }, Policies: storedRule{rule}})
			require.NoError(t, err)
			d, err := limiter.Take(t.Context(), limit.Global().Cost(test.before))
			require.NoError(t, err)
			require.True(t, d.Allowed)
			now = opening.Add(31 * time.Second)
			require.InDelta(t, test.left, held(t, limiter, limit.Global()), 1e-9)
		}
	})
	t.Run("ANewRateLeavesWhatWasTakenBefore", func(t *testing.T) {
		t.Parallel()
		runOnServer(t, pool, ratelimit.PerMinute(10), []step{
			{at: 0, take: 10, left: 0},
			{at: 30 * time.Second, take: 5, left: 0}, // a take settles the time before it
			{at: 30 * time.Second, policy: ratelimit.PerMinute(1000), take: 1, refused: true, left: 0, wait: 60 * time.Millisecond},
		})
	})
	t.Run("ALowerCapacityCutsWhatIsThere", func(t *testing.T) {
		t.Parallel()
		runOnServer(t, pool, ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 20}, []step{
			{at: 0, take: 1, left: 19},
			{at: 0, policy: ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 5}, take: 1, left: 4},
			{at: 0, policy: ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 20}, left: 4},
		})
	})
	t.Run("AFlippingCapacityFillsNothing", func(t *testing.T) {
		t.Parallel()
		story := []step{{at: 0, take: 10, left: 0}}
		for i := range 200 {
			story = append(story, step{
				policy: ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: float64(10 + i%2)},
				take:   1, refused: true, left: 0, wait: 6 * time.Second,
			})
		}
		runOnServer(t, pool, ratelimit.PerMinute(10), story)
	})
	t.Run("OwedTokensBeyondTheNewBoundAreStillRepaid", func(t *testing.T) {
		t.Parallel()
		runOnServer(t, pool, ratelimit.PerSecond(1), []step{
			{at: 0, reserve: 101, left: -100, wait: 100 * time.Second},
			{at: 0, policy: ratelimit.TokenBucket{Rate: 1, Period: time.Second, MaxReserved: 10}, reserve: 1, refused: true, left: -100, wait: 91 * time.Second},
			{at: 91 * time.Second, reserve: 1, left: -10, wait: 10 * time.Second},
			{at: 101 * time.Second, policy: ratelimit.TokenBucket{Rate: 1, Period: time.Second, MaxReserved: ratelimit.NoReservations}, take: 1, refused: true, left: 0, wait: time.Second},
			{at: 102 * time.Second, take: 1, left: 0},
		})
	})
	t.Run("ABucketBecomesAWindowAtTheNextStart", func(t *testing.T) {
		t.Parallel()
		runOnServer(t, pool, ratelimit.PerMinute(10), []step{
			{at: 90 * time.Second, take: 10, left: 0},
			{at: 91 * time.Second, policy: ratelimit.FixedWindow{Rate: 10, Period: time.Minute, Start: opening}, take: 1, refused: true, left: 0, wait: 29 * time.Second},
			{at: 120 * time.Second, take: 10, left: 0},
			{at: 120 * time.Second, policy: ratelimit.PerMinute(10), take: 1, refused: true, left: 0, wait: 6 * time.Second},
			{at: 126 * time.Second, take: 1, left: 0},
		})
	})
}

// storedRule is a source with one rule.
type storedRule struct{ rule *ratelimit.Ruling }

func (s storedRule) RulingFor(ratelimit.Limit, string, string) *ratelimit.Ruling { return s.rule }
func (s storedRule) RulingsOf(string) []*ratelimit.Ruling                        { return []*ratelimit.Ruling{s.rule} }
