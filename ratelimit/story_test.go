package ratelimit

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// opening is when every story begins. It is a whole number of days and weeks of the Unix epoch's minutes,
// hours and days, but that matters to no story: windows that should start here say so.
var opening = time.Date(2026, time.March, 2, 0, 0, 0, 0, time.UTC)

// forever marks a step that no wait would turn around.
const forever = time.Duration(math.MaxInt64)

// step is one call of a story, and its answer. A step that takes and reserves nothing only looks.
type step struct {
	at      time.Duration // since opening; the clock may step back
	policy  Policy        // replaces the story's policy from here on
	take    float64
	reserve float64
	refused bool
	left    float64       // what the bucket holds after the step
	wait    time.Duration // refused: until the same call is allowed. reserved: until the work may run
}

// run tells a story of one bucket that has no row when it opens.
func run(t *testing.T, policy Policy, story []step) {
	t.Helper()
	limit := Define("story", policy)
	row := limit.termsFor("").Full(opening.UnixMicro())
	for i, s := range story {
		if s.policy != nil {
			limit = Define("story", s.policy)
		}
		row = s.play(t, i, limit, row)
	}
}

// play makes the call of one step on row and returns the row it leaves.
func (s step) play(t *testing.T, i int, limit Limit, row bucket.State) bucket.State {
	t.Helper()
	b := ask{limit: limit, terms: limit.termsFor(""), cost: s.take + s.reserve}
	err := b.bound(s.reserve > 0)
	if s.wait == forever {
		require.Error(t, err, "step %d at %v: no wait helps, so it is an error", i, s.at)
		return row
	}
	require.NoError(t, err, "step %d at %v", i, s.at)

	now := opening.Add(s.at).UnixMicro()
	a := answer{state: row, now: now, allowed: true}
	if b.cost > 0 {
		a.state, a.allowed = b.terms.Take(row, now, b.cost, b.lowest)
	}
	got := b.decide(a)
	wait := got.RetryAfter
	if s.reserve > 0 && a.allowed {
		wait = b.terms.Wait(a.state, now, 0, 0)
	}
	require.Equal(t, !s.refused, got.Allowed, "step %d at %v: allowed, with %v left", i, s.at, got.Value.Tokens)
	require.InDelta(t, s.left, got.Value.Tokens, 1e-9, "step %d at %v: tokens left", i, s.at)
	require.InDelta(t, max(s.left, 0), got.Remaining, 1e-9, "step %d at %v: remaining", i, s.at)
	require.Equal(t, s.wait, wait, "step %d at %v: wait", i, s.at)
	if s.refused {
		require.Equal(t, row, a.state, "step %d at %v: a refusal changes nothing", i, s.at)
	}
	return a.state
}

// admitted counts the single tokens that a caller gets who asks at every instant of a schedule.
func admitted(limit Limit, schedule []time.Duration) int {
	terms := limit.termsFor("")
	row := terms.Full(opening.UnixMicro())
	count := 0
	for _, at := range schedule {
		next, allowed := terms.Take(row, opening.Add(at).UnixMicro(), 1, 0)
		if row = next; allowed {
			count++
		}
	}
	return count
}

// every is a schedule of n instants, evenly over each second, from start on.
func every(perSecond int, start, length time.Duration) []time.Duration {
	var schedule []time.Duration
	for i := 0; ; i++ {
		at := time.Duration(i) * time.Second / time.Duration(perSecond)
		if at >= length {
			return schedule
		}
		schedule = append(schedule, start+at)
	}
}
