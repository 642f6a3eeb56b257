package rules

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TestPausesOfRows promises what pauses are left of rows, which one is under way at an instant, and when the next begins.
func TestPausesOfRows(t *testing.T) {
	t.Parallel()
	pause := func(from, until int64) row {
		return row{of: OfPause, name: "messages", key: "ana", says: []byte("{}"), from: from, until: &until, reason: "a test"}
	}
	resume := func(from int64) row { return row{of: OfPause, name: "messages", key: "ana", from: from} }
	for name, c := range map[string]struct {
		rows       []row
		now, until int64 // 0: not paused
		next       int64 // 0: none lies ahead
	}{
		"UnderWay":                  {[]row{pause(10, 20)}, 15, 20, 0},
		"Over":                      {[]row{pause(10, 20)}, 20, 0, 0},
		"Ahead":                     {[]row{pause(10, 20)}, 5, 0, 10},
		"InPlaceOfOne":              {[]row{pause(10, 40), pause(15, 30)}, 20, 30, 0},
		"TheRestOfOneIsGone":        {[]row{pause(10, 40), pause(15, 30)}, 35, 0, 0},
		"OneThatLiesAheadStays":     {[]row{pause(30, 40), pause(10, 20)}, 15, 20, 30},
		"OneThatWasEarlierStays":    {[]row{pause(10, 20), pause(30, 40)}, 15, 20, 30},
		"OneFollowsTheOther":        {[]row{pause(20, 30), pause(10, 20)}, 15, 30, 0},
		"Resumed":                   {[]row{pause(10, 20), resume(12)}, 15, 0, 0},
		"ResumedBeforeItBegins":     {[]row{pause(10, 20), resume(5)}, 15, 0, 0},
		"PausedAgain":               {[]row{pause(10, 20), resume(12), pause(13, 18)}, 15, 18, 0},
		"ResumedAfterOneHasEnded":   {[]row{pause(10, 20), resume(25), pause(30, 40)}, 27, 0, 30},
		"OfTwoThatMeetTheLaterEnds": {[]row{pause(10, 20), pause(15, 40)}, 12, 40, 0},
	} {
		s := compile(&loaded{now: c.now, rows: c.rows}, &definitions{})
		var until int64
		if of := s.limits["messages"]; of != nil {
			until = of.keys["ana"].pause.until
		}
		require.Equal(t, c.until, until, name)
		if c.next == 0 {
			c.next = maxInstant
		}
		require.Equal(t, c.next, s.wake, name)
	}
}

// A limit that no code defines has, on a plan without a rule, the smallest of the policies in effect, and not one that was replaced.
func TestStandInIsTheSmallestPolicyInEffect(t *testing.T) {
	t.Parallel()
	var rows []row
	for _, r := range []struct {
		plan           string
		capacity, from int64
	}{{"free", 7, 10}, {"pro", 60, 10}, {"free", 20, 20}, {"pro", 5, 40}} {
		made, err := rowOfRule(Rule{Limit: "api", Plan: r.plan, Policy: ratelimit.PerMinute(float64(r.capacity))})
		require.NoError(t, err)
		made.from = r.from
		rows = append(rows, made)
	}
	for now, want := range map[int64]struct {
		capacity float64
		until    int64
	}{5: {7, 10}, 15: {7, 20}, 25: {20, 40}, 45: {5, maxInstant}} {
		s := compile(&loaded{now: now, rows: rows}, &definitions{})
		limit, ok := s.limits["api"].standIn()
		require.True(t, ok)
		require.Equal(t, want.capacity, limit.Capacity(), now)
		require.Equal(t, want.until, s.wake, now)
	}
}
