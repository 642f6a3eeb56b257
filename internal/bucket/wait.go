package bucket

import (
	"math"
	"time"
)

// Horizon is the longest wait that is reported, in microseconds. Waits up to twice MaxSpan occur; only
// a row written under another policy can be further from recovery.
const Horizon = int64(250 * 365 * 24 * time.Hour / time.Microsecond)

// Wait returns how long from now it takes until cost tokens can be taken and lowest remain, to the
// microsecond: at now plus the answer Take succeeds, a microsecond (a window) before it does not.
func (t Terms) Wait(s State, now int64, cost, lowest float64) time.Duration {
	s = t.FixClock(s, now)
	enough := func(n int64) bool { return t.after(s, n)-cost >= lowest }
	if enough(t.elapsed(s, now)) {
		return 0
	}
	estimate := math.Ceil((cost + lowest - s.Value) * t.Steps / t.Rate)
	limit := t.elapsed(s, now) + Horizon/t.Step + 2 // counted from s.TS, and past the horizon of now
	n := first(int64(min(max(estimate, 1), float64(limit))), limit, enough)
	at := t.Begin(s.TS) + n*t.Step
	return time.Duration(min(at-now, Horizon)) * time.Microsecond
}

// UntilFull returns how long from now it takes until the bucket holds its capacity.
func (t Terms) UntilFull(s State, now int64) time.Duration {
	return t.Wait(s, now, t.Capacity, 0)
}

// first returns the smallest n in [1, limit] for which ok holds, or limit when there is none. ok must
// not turn false again as n grows. It looks around estimate first, and doubles the radius until the
// answer is bracketed, so an estimate that is off by a rounding costs a handful of calls.
func first(estimate, limit int64, ok func(int64) bool) int64 {
	estimate = min(max(estimate, 1), limit)
	low, high := estimate-1, estimate
	for radius := int64(1); low > 0 && ok(low); radius *= 2 {
		high, low = low, max(low-radius, 0)
	}
	for radius := int64(1); high < limit && !ok(high); radius *= 2 {
		low, high = high, min(high+radius, limit)
	}
	for low+1 < high { // ok(high), or high is limit; not ok(low), or low is 0
		if middle := low + (high-low)/2; ok(middle) {
			high = middle
		} else {
			low = middle
		}
	}
	return high
}
