package bucket

import (
	"math"
	"time"
)

// Ahead is what a process took from a bucket in one decision, to give it out by itself for a while.
//
// Tokens of a fixed window are given out in the window in which they were taken, and can be given back only then. So the row of
// the window bounds them, as the policy promises.
//
// Tokens of a token bucket are given out within Prefetch of the decision. The row holds less, so that the promise of the policy holds:
//
//	Capacity of the row = Capacity of the policy - Rate * Prefetch
//
// Tokens that are given out in a span T were taken from the row in a span of T + Prefetch. In that span the row gives at most
// its capacity + Rate * (T + Prefetch) = the policy's capacity + Rate * T.
type Ahead struct {
	Taken float64 // in the decision
	Left  float64 // of it
	TS    int64   // of the row after the decision
}

// A clock that is slewed runs by up to 500 millionths too fast or too slow. So at the end of a span two clocks differ by no more
// than a thousandth of it: one in clockDrift.
const clockDrift = 1000

// isWindow reports whether tokens arrive at the beginning of windows.
func isWindow(t *Terms) bool { return t.Step > 1 }

// KeptFor returns for how long prefetched tokens of a decision at now may be given out, in microseconds. The time counts from before
// the request for the decision, on any clock. It is Prefetch, or less if the terms or the window end sooner. A decision that waited
// for the row may have taken from a later window. Then the tokens are kept for less time than possible.
func KeptFor(t *Terms, now int64) int64 {
	kept := t.Prefetch
	if _, until := t.Span(); until < now+kept {
		kept = until - now
	}
	if isWindow(t) {
		left := t.step(now, 0) + t.Step - now
		kept = min(kept, left-left/clockDrift-1) // now may be a microsecond ago, rounded down
	}
	return max(kept, 0)
}

// FullAfter is UntilFull of a state of now, for answers from memory: for a token bucket it does not search for the exact rounding.
func FullAfter(t *Terms, s State, now int64) time.Duration {
	if isWindow(t) {
		return Rows{s}.Wait(t, now, t.Capacity, 0)
	}
	return time.Duration(math.Ceil((t.Capacity-s.Value)*t.Steps/t.Rate)) * time.Microsecond
}

// Returning returns terms and an Ahead to pass to Return. The tokens of a window can be given back until the next window begins, and
// not after that. In the returned terms all tokens arrive with the first microsecond of the next window.
func (a Ahead) Returning(t Terms) (Terms, Ahead) {
	if isWindow(&t) {
		a.TS = t.step(a.TS, 0) + t.Step - 1
		t.Rate, t.Steps = max(t.Capacity, a.Taken), 1
	}
	return t, a
}

// Under returns the terms for giving back tokens that were taken under t while other terms hold: no more than both allow. It returns
// false if nothing may be given back, because the two have different windows.
func Under(t, other Terms) (Terms, bool) {
	t.Capacity, t.Rate = min(t.Capacity, other.Capacity), max(t.Rate, other.Rate/other.Steps*t.Steps)
	return t, !isWindow(&t) && !isWindow(&other)
}

// Returnable returns how many of the tokens left may be given back at now to the bucket whose row has this TS. The bucket
// is then never fuller than without the decision that took them:
//
//	min(Left, Taken - what arrives from the decision until now)
//
// After the decision it held no more than its capacity - Taken. So without the part that is left it would have lost to the
// capacity no more than arrived - (Taken - Left). Without this bound tokens that go back and forth between processes would
// be out of reach of the capacity, and pile up.
func (a Ahead) Returnable(t *Terms, ts, now int64) float64 {
	arrived := float64(float64(max(max(ts, now)-a.TS, 0))*t.Rate) / t.Steps
	return max(min(a.Left, float64(a.Taken-arrived)), 0)
}

// Return returns the state of a bucket's row after the tokens left were given back at now.
func (a Ahead) Return(t *Terms, s State, now int64) State {
	if given := a.Returnable(t, s.TS, now); given > 0 {
		s.Value = min(t.most(s, 0), s.Value+given)
	}
	return s
}

// RowCapacity returns the capacity of the row of a bucket if processes keep tokens for prefetch. It returns false if that is less
// than half of the capacity.
func RowCapacity(capacity, rate, steps float64, prefetch int64) (row float64, enough bool) {
	arrives := float64(float64(prefetch)*rate) / steps
	return capacity - arrives, arrives <= capacity/2
}
