package ratelimit_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func TestFixedWindow(t *testing.T) {
	t.Parallel()

	t.Run("GivesAllTokensAtTheStartOfEachWindow", func(t *testing.T) {
		t.Parallel()
		run(t, ratelimit.FixedWindow{Rate: 100, Period: time.Minute, Start: opening}, []step{
			{at: 10 * time.Second, take: 100, left: 0},
			{at: 10 * time.Second, take: 1, refused: true, left: 0, wait: 50 * time.Second},
			{at: time.Minute - time.Microsecond, take: 1, refused: true, left: 0, wait: time.Microsecond},
			{at: time.Minute, take: 1, left: 99}, // though the last call was ten seconds into its window
			{at: time.Minute, take: 99, left: 0},
			{at: 2*time.Minute - time.Microsecond, left: 0},
			{at: 2 * time.Minute, left: 100},
			{at: time.Hour, left: 100},
		})
	})
	t.Run("AdmitsTwiceTheRateAcrossABoundary", func(t *testing.T) {
		t.Parallel()
		run(t, ratelimit.FixedWindow{Rate: 100, Period: time.Minute, Start: opening}, []step{
			{at: time.Minute - time.Microsecond, take: 100, left: 0},
			{at: time.Minute, take: 100, left: 0},
			{at: time.Minute, take: 1, refused: true, left: 0, wait: time.Minute},
		})
	})
	t.Run("RollsUnusedTokensOverUpToCapacity", func(t *testing.T) {
		t.Parallel()
		run(t, ratelimit.FixedWindow{Rate: 10, Period: time.Hour, Capacity: 25, Start: opening}, []step{
			{at: 0, take: 25, left: 0},
			{at: 1 * time.Hour, take: 4, left: 6},
			{at: 2 * time.Hour, take: 1, left: 15},
			{at: 3 * time.Hour, left: 25},
			{at: 4 * time.Hour, take: 25, left: 0}, // a whole capacity in one window, and no more
			{at: 4*time.Hour + 59*time.Minute, take: 1, refused: true, left: 0, wait: time.Minute},
			{at: 5*time.Hour + 59*time.Minute, take: 10, left: 0},
			{at: 6 * time.Hour, take: 11, refused: true, left: 10, wait: time.Hour},
			{at: 7 * time.Hour, take: 11, left: 9},
			{at: 100 * time.Hour, take: 26, wait: forever},
			{at: 100 * time.Hour, left: 25},
		})
	})
	t.Run("WaitsWholeWindows", func(t *testing.T) {
		t.Parallel()
		run(t, ratelimit.FixedWindow{Rate: 10, Period: time.Minute, Capacity: 40, Start: opening}, []step{
			{at: 0, take: 40, left: 0},
			{at: 15 * time.Second, take: 1, refused: true, left: 0, wait: 45 * time.Second},
			{at: 15 * time.Second, take: 10, refused: true, left: 0, wait: 45 * time.Second},
			{at: 15 * time.Second, take: 10.5, refused: true, left: 0, wait: 105 * time.Second},
			{at: 15 * time.Second, take: 31, refused: true, left: 0, wait: 225 * time.Second},
			{at: 240*time.Second - time.Microsecond, take: 31, refused: true, left: 30, wait: time.Microsecond},
			{at: 240 * time.Second, take: 31, left: 9},
		})
	})
	t.Run("OwesWhatWasReservedToTheWindowsAhead", func(t *testing.T) {
		t.Parallel()
		runOnServer(t, postgrestest.New(t), ratelimit.FixedWindow{Rate: 10, Period: time.Minute, Start: opening}, []step{
			{at: 0, take: 10, left: 0},
			{at: 30 * time.Second, reserve: 1, left: -1, wait: 30 * time.Second},
			{at: 30 * time.Second, reserve: 9, left: -10, wait: 30 * time.Second},
			{at: 30 * time.Second, reserve: 1, left: -11, wait: 90 * time.Second},
			{at: 1 * time.Minute, take: 1, refused: true, left: -1, wait: time.Minute},
			{at: 2 * time.Minute, take: 9, left: 0},
			{at: 2 * time.Minute, take: 1, refused: true, left: 0, wait: time.Minute},
			{at: 3 * time.Minute, take: 10, left: 0},
		})
	})
}

func TestFixedWindowStart(t *testing.T) {
	t.Parallel()

	t.Run("MayBeALocalMidnight", func(t *testing.T) {
		t.Parallel()
		pacific := time.FixedZone("PDT", -7*60*60)
		run(t, ratelimit.FixedWindow{Rate: 5, Period: ratelimit.Day, Start: time.Date(2025, time.July, 4, 0, 0, 0, 0, pacific)}, []step{
			{at: 0, take: 5, left: 0}, // 17:00 on the day before
			{at: 7*time.Hour - time.Microsecond, take: 1, refused: true, left: 0, wait: time.Microsecond},
			{at: 7 * time.Hour, take: 5, left: 0},
			{at: 8 * time.Hour, take: 1, refused: true, left: 0, wait: 23 * time.Hour},
		})
	})
	t.Run("InTheFutureMakesWindowsBeforeItToo", func(t *testing.T) {
		t.Parallel()
		for _, start := range []time.Duration{20 * time.Minute, 72*time.Hour + 20*time.Minute, -40 * time.Minute, 9000*ratelimit.Day + 20*time.Minute} {
			run(t, ratelimit.FixedWindow{Rate: 5, Period: time.Hour, Start: opening.Add(start)}, []step{
				{at: 0, take: 5, left: 0},
				{at: 0, take: 1, refused: true, left: 0, wait: 20 * time.Minute},
				{at: 20 * time.Minute, take: 5, left: 0},
				{at: 20 * time.Minute, take: 1, refused: true, left: 0, wait: time.Hour},
				{at: 80 * time.Minute, left: 5},
			})
		}
	})
	t.Run("OfYearOneAndOfYear9999Work", func(t *testing.T) {
		t.Parallel()
		for _, start := range []time.Time{time.Date(1, 1, 1, 0, 0, 1, 0, time.UTC), time.Date(9999, 12, 31, 0, 0, 1, 0, time.UTC)} {
			run(t, ratelimit.FixedWindow{Rate: 5, Period: ratelimit.Day, Start: start}, []step{
				{at: time.Second, take: 5, left: 0},
				{at: ratelimit.Day, take: 5, refused: true, left: 0, wait: time.Second},
				{at: ratelimit.Day + time.Second, take: 5, left: 0},
			})
		}
	})
	t.Run("ThatChangesTakesEffectAtTheNextOfItsWindows", func(t *testing.T) {
		t.Parallel()
		onTheHour := ratelimit.FixedWindow{Rate: 5, Period: time.Hour, Start: opening}
		atTwenty := ratelimit.FixedWindow{Rate: 5, Period: time.Hour, Start: opening.Add(20 * time.Minute)}
		runOnServer(t, postgrestest.New(t), onTheHour, []step{
			{at: 10 * time.Minute, take: 5, left: 0},
			{at: 10 * time.Minute, policy: atTwenty, take: 1, refused: true, left: 0, wait: 10 * time.Minute},
			{at: 20 * time.Minute, take: 5, left: 0},
			{at: 79 * time.Minute, take: 1, refused: true, left: 0, wait: time.Minute},
			{at: 80 * time.Minute, take: 1, left: 4},
		})
	})
}

// TestFixedWindowWithoutStart is about the windows that a limit has when its policy does not say.
func TestFixedWindowWithoutStart(t *testing.T) {
	t.Parallel()
	policy := ratelimit.FixedWindow{Rate: 5, Period: time.Hour}
	limit := ratelimit.Define("spread", policy)

	t.Run("KeysRollOverAtDifferentMoments", func(t *testing.T) {
		t.Parallel()
		starts := make(map[time.Duration]int)
		for i := range 1000 {
			starts[windowOf(t, limit.For(fmt.Sprintf("key%d", i))).Sub(opening).Truncate(6*time.Minute)]++
		}
		require.Len(t, starts, 10) // of ten stretches of six minutes
		for stretch, keys := range starts {
			require.InDelta(t, 100, keys, 50, "windows that begin about %v", stretch)
		}
	})
	t.Run("LimitsRollOverAtDifferentMomentsForOneKey", func(t *testing.T) {
		t.Parallel()
		start := func(name, key string) time.Time { return windowOf(t, ratelimit.Define(name, policy).For(key)) }
		require.NotEqual(t, start("a", "key"), start("b", "key"))
		require.NotEqual(t, start("a", "bc"), start("ab", "c"))
	})
	t.Run("AFullRowTellsNothingThatNoRowDoesNot", func(t *testing.T) {
		t.Parallel()
		request := limit.For("key1")
		start := windowOf(t, request)
		now := start.Add(5*time.Hour + 30*time.Minute)
		old, d := request.Full(start).Take(start, 3)
		require.True(t, d.Allowed)
		kept, _ := old.Take(now, 4)
		deleted, d := request.Full(now).Take(now, 4)
		require.Equal(t, kept, deleted)
		require.Equal(t, start.Add(6*time.Hour), now.Add(d.ResetAfter))
	})
	t.Run("TheSameKeyHasTheSameWindowsInEveryProcess", func(t *testing.T) {
		t.Parallel()
		// FNV-1a of "spread\x00key1" modulo an hour. A release that changes it moves everybody's windows once.
		require.Equal(t, int64(1772408367189456), windowOf(t, limit.For("key1")).UnixMicro())
	})
}

// windowOf returns when the window began that the bucket is in when stories open. Its windows last for an hour.
func windowOf(t *testing.T, request ratelimit.Request) time.Time {
	t.Helper()
	_, d := request.Full(opening).Take(opening, request.Limit().Capacity())
	require.True(t, d.Allowed)
	require.Positive(t, d.ResetAfter)
	require.LessOrEqual(t, d.ResetAfter, time.Hour)
	return opening.Add(d.ResetAfter - time.Hour)
}

func TestFixedWindowAdmitsAtMostTwiceItsRateInAnyPeriod(t *testing.T) {
	t.Parallel()
	limit := ratelimit.Define("twice", ratelimit.FixedWindow{Rate: 7, Period: time.Second, Start: opening.Add(300 * time.Millisecond)})
	for _, start := range []time.Duration{0, 100 * time.Millisecond, 300 * time.Millisecond, 999 * time.Millisecond} {
		require.LessOrEqual(t, admitted(limit, every(100, start, time.Second)), 14)
		require.InDelta(t, 70, admitted(limit, every(100, start, 10*time.Second)), 7)
	}
}
