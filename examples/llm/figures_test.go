package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestFigures(t *testing.T) {
	t.Parallel()
	const way = time.Second
	good := figures{settled: 10, metered: 10, longestWay: way}

	t.Run("AreAsPromised", func(t *testing.T) {
		t.Parallel()
		require.NoError(t, good.judge(way, newLimits(short())))
	})

	t.Run("DoNotPromiseWhatTheMachineIsTooBusyFor", func(t *testing.T) {
		t.Parallel()
		f := good
		f.refused, f.overtaken, f.longestWay = 1, 1, way+1
		require.NoError(t, f.judge(way, newLimits(short())))
		f.stale, f.lost = 1, 1
		require.Error(t, f.judge(way, newLimits(short())))
	})

	for want, spoil := range map[string]func(*figures){
		"the upstream refused 1 requests, want none":                           func(f *figures) { f.refused = 1 },
		"1 jobs were lost, want none":                                          func(f *figures) { f.lost = 1 },
		"1 jobs ran twice, want none":                                          func(f *figures) { f.twice = 1 },
		"1 reservations were not settled, want none":                           func(f *figures) { f.open = 1 },
		"11 tokens were settled, but the upstream counted 10":                  func(f *figures) { f.settled = 11 },
		"1 large requests were overtaken by one reserved for later, want none": func(f *figures) { f.overtaken = 1 },
		"the upstream had 3 questions of the hasty at once, want 2 at most":    func(f *figures) { f.atOnce = map[string]int{"hasty": 3} },
		"1 jobs were started although their moment was long over, want none":   func(f *figures) { f.stale = 1 },
	} {
		t.Run("FailFor/"+want, func(t *testing.T) {
			t.Parallel()
			f := good
			spoil(&f)
			require.EqualError(t, f.judge(way, newLimits(short())), want)
		})
	}

	t.Run("CountLostAndRepeatedJobs", func(t *testing.T) {
		t.Parallel()
		var f figures
		f.countRuns([]string{"a", "b", "c", "d"}, []turn{{ID: "a"}, {ID: "b"}, {ID: "d"}}, []call{{id: "a"}, {id: "b"}, {id: "c"}, {id: "b"}})
		require.Equal(t, 2, f.lost) // c has no answer, d was never sent
		require.Equal(t, 1, f.twice)
	})

	t.Run("CountWhatAUserHasAtOnce", func(t *testing.T) {
		t.Parallel()
		begin := time.Now()
		at := func(seconds int) time.Time { return begin.Add(time.Duration(seconds) * time.Second) }
		var f figures
		f.overlap([]turn{{ID: "a", Asker: "ada"}, {ID: "b", Asker: "ada"}, {ID: "c", Asker: "ada"}, {ID: "d", Asker: "bob"}}, []call{
			{id: "a", at: at(0), ended: at(3)}, {id: "b", at: at(1), ended: at(2)}, {id: "d", at: at(1), ended: at(5)}, {id: "c", at: at(2), ended: at(4)},
		})
		require.Equal(t, map[string]int{"ada": 2, "bob": 1}, f.atOnce) // c began as b had ended
	})

	t.Run("MeasureUtilisationWhileTheUpstreamIsBusy", func(t *testing.T) {
		t.Parallel()
		begin := time.Now()
		at := func(minutes int) time.Time { return begin.Add(time.Duration(minutes) * time.Minute) }
		calls := []call{
			{at: at(0), tokens: upstreamTokens / 2},
			{at: at(1), tokens: upstreamTokens / 4},
			{at: at(2), tokens: 1},
			{at: at(5), tokens: upstreamTokens / 4},
			{at: at(6), tokens: 2}, // the workers were away until the fourth minute
		}
		var f figures
		f.utilise(calls, time.Minute, at(4))
		require.InDelta(t, 1.0/3, f.tokens, 1e-9)
		require.InDelta(t, 1.0/upstreamRequests, f.requests, 1e-9)
		require.Equal(t, upstreamTokens+3, f.metered)

		f = figures{}
		f.utilise(calls, time.Minute, time.Time{})
		require.InDelta(t, (1.0+1.0/upstreamTokens)/6, f.tokens, 1e-9)
	})

	t.Run("FindLargeRequestsThatWereOvertaken", func(t *testing.T) {
		t.Parallel()
		begin := time.Now()
		var turns []turn
		for i, id := range []string{"a", "b", "c"} {
			turns = append(turns, turn{ID: id, Estimate: large, SlotAt: begin.Add(time.Duration(i) * time.Second)})
		}
		var f figures
		f.orderLarge(turns, []call{{id: "a"}, {id: "small"}, {id: "c"}, {id: "b"}}, time.Second/2)
		require.Equal(t, []int{1, 3, 2}, f.served)
		require.Equal(t, 1, f.overtaken)

		f = figures{}
		f.orderLarge(turns, []call{{id: "a"}, {id: "c"}, {id: "b"}}, time.Second) // as late as work may be
		require.Zero(t, f.overtaken)
	})
}

func TestPercentile(t *testing.T) {
	t.Parallel()

	t.Run("IsAValueThatAShareDoesNotExceed", func(t *testing.T) {
		t.Parallel()
		var values []time.Duration
		for i := range time.Duration(100) {
			values = append(values, 100-i)
		}
		require.Equal(t, time.Duration(50), percentile(values, 0.5))
		require.Equal(t, time.Duration(95), percentile(values, 0.95))
		require.Equal(t, time.Duration(100), percentile(values, 1))
		require.Equal(t, time.Duration(7), percentile([]time.Duration{7}, 0.5))
		require.Zero(t, percentile(nil, 0.5))
	})
}
