package bucket

import (
	"math"
	"time"
)

// Ahead is what a process took from a bucket in one decision, to give it out by itself for a while.
//
// Of a fixed window it is given out in the window in which it was taken, and may be given back in that. So what is given out in
// a window was taken from the row in that, and the promise of the policy is the row's.
//
// Of a token bucket, what is given out within Prefetch of the decision keeps the promise of the policy, whose row holds so much less:
//
//	Capacity of the row = Capacity of the policy - Rate * Prefetch
//
// For what is given out in a span T was taken from the row in a span of T + Prefetch, and in that the row gives no more than
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

// KeptFor returns for how long what was taken ahead in a decision at now may be given out, in microseconds, to be counted from
// before the decision was asked for, on any clock. That is for Prefetch, and not beyond the end of the terms or of the window. A
// decision that waited for the row may have taken from the window after that; then it is kept for less than it could be.
func KeptFor(t *Terms, now int64) int64 {
	kept := t.Prefetch
	if _, until := t.Span(); until < now+kept {
		kept = until - now
	}
	if isWindow(t) {
		left := t.Kind.Begin(*t, now, 0) + t.Step - now
		kept = min(kept, left-left/clockDrift-1) // now may be a microsecond ago, rounded down
	}
	return max(kept, 0)
}

// FullAfter is UntilFull of a state of now for whoever answers from memory: of a token bucket, without a search for the
// last rounding.
func FullAfter(t *Terms, s State, now int64) time.Duration {
	if isWindow(t) {
		return Rows{s}.Wait(t, now, t.Capacity, 0)
	}
	return time.Duration(math.Ceil((t.Capacity-s.Value)*t.Steps/t.Rate)) * time.Microsecond
}

// Returning returns terms and a for which Return does what is right for t: of a window all that is left may be
// given back until the next one begins, and nothing from then on. These are terms by which all of it arrives with the first
// microsecond of that.
func (a Ahead) Returning(t Terms) (Terms, Ahead) {
	if isWindow(&t) {
		a.TS = t.Kind.Begin(t, a.TS, 0) + t.Step - 1
		t.Rate, t.Steps = max(t.Capacity, a.Taken), 1
	}
	return t, a
}

// Under returns the terms under which what was taken under t may be given back while other terms hold, so that it is no more than
// either of them allow; and false where nothing may be given back, as windows of one are none of the other.
func Under(t, other Terms) (Terms, bool) {
	t.Capacity, t.Rate = min(t.Capacity, other.Capacity), max(t.Rate, other.Rate/other.Steps*t.Steps)
	return t, !isWindow(&t) && !isWindow(&other)
}

// Returnable returns how much of what is left may be given back at now to the bucket whose row has this TS. The bucket
// is then never fuller than if it had never been taken:
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

// Return returns the state of a bucket's row after what is left was given back at now.
func (a Ahead) Return(t *Terms, s State, now int64) State {
	if given := a.Returnable(t, s.TS, now); given > 0 {
		s.Value = min(max(t.Capacity, s.Value), s.Value+given)
	}
	return s
}

// RowCapacity returns what the row of a bucket may hold where processes keep tokens for prefetch, and false when that is not
// half of the capacity or more.
func RowCapacity(capacity, rate, steps float64, prefetch int64) (row float64, enough bool) {
	arrives := float64(float64(prefetch)*rate) / steps
	return capacity - arrives, arrives <= capacity/2
}
