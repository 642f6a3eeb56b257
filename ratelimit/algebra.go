package ratelimit

import (
	"math"
	"time"
)

// The numbers of the algebra are kept where float64 arithmetic on them is exact to well under a token
// and no sum of microseconds overflows.
const (
	maxTokens = 1e12
	minTokens = 1e-9

	// maxSpan bounds a period, the time an empty bucket takes to fill, and the time a debt takes to be
	// repaid. A bucket that fills within it gains more with every microsecond than a rounding loses.
	maxSpan = 36525 * Day

	// horizon is the longest wait that is reported, in microseconds. Waits up to twice maxSpan occur; only
	// a row written under another policy can be further from recovery.
	horizon = int64(250 * 365 * Day / time.Microsecond)

	// minInstant and maxInstant are the years 1 and 9999, in microseconds since 1970.
	minInstant = int64(-62135596800000000)
	maxInstant = int64(253402300799999999)

	// longAgo is the start of 1900: a bucket that held anything then is full, whatever its terms, and numbers of
	// JavaScript still hold the microseconds since.
	longAgo = int64(-2208988800000000)

	// clockTolerance is how far ts may be ahead of now before it is taken for the mark of a wrong clock.
	// It has to exceed any wait for a row lock: a statement that waited has an older now than the row.
	clockTolerance = time.Minute
)

// terms are a policy as the statements see it. Tokens arrive in steps: a fixed window's step is its
// period, a token bucket's is a microsecond, and that is all the difference between the two.
//
//	tokens(now) = min(capacity, value + n * rate / steps)
//	n           = steps begun after ts and up to now
type terms struct {
	capacity float64
	rate     float64 // tokens that arrive each period
	steps    float64 // steps in a period
	step     int64   // a step's length in microseconds
	phase    int64   // the instant the first step begins, from minInstant on
	maxDebt  float64 // how far below zero a reservation may go
	reserves bool    // whether reservations are taken at all
	spread   bool    // whether phase is to be derived from the key
	shards   int32   // the rows a bucket is spread over
}

// state is a bucket's row: value tokens were held at ts, microseconds since 1970.
type state struct {
	value float64
	ts    int64
}

// begin returns the instant at which the step that holds now began, and for instants before the first step when
// that will.
func (t terms) begin(now int64) int64 {
	return t.phase + (now-t.phase)/t.step*t.step
}

// full is the state of a bucket that has no row.
func (t terms) full(now int64) state {
	return state{value: t.capacity, ts: t.begin(now)}
}

// tolerance is how far, in microseconds, ts may be ahead of the current step's begin.
func (t terms) tolerance() int64 {
	return t.step + clockTolerance.Microseconds()
}

// ahead reports whether s was written by a clock that was wrong.
func (t terms) ahead(s state, now int64) bool {
	return s.ts > t.begin(now)+t.tolerance()
}

// after returns the tokens s has grown to when n more steps have begun. The conversions keep the compiler
// from fusing operations, so that the result is the same to the last bit on every machine and in Postgres.
func (t terms) after(s state, n int64) float64 {
	arrived := float64(float64(n)*t.rate) / t.steps
	return min(t.capacity, float64(s.value+arrived))
}

// elapsed returns the number of steps that began after s.ts, up to now; zero when ts is not yet reached.
func (t terms) elapsed(s state, now int64) int64 {
	return (max(t.begin(now)-s.ts, 0) + t.step - 1) / t.step // ceil: a ts inside a step counts as its begin
}

// tokens returns what the bucket holds at now: negative while reservations are owed.
func (t terms) tokens(s state, now int64) float64 {
	return t.after(s, t.elapsed(s, now))
}

// take returns the state after cost tokens are taken at now, and whether at least lowest remain. When
// they do not, the state is the one passed in. It mirrors bucket_take.sql, which is what decides.
func (t terms) take(s state, now int64, cost, lowest float64) (state, bool) {
	value := t.tokens(s, now) - cost
	if !(value >= lowest) {
		return s, false
	}
	if t.ahead(s, now) {
		return state{value: value, ts: t.begin(now)}, true
	}
	return state{value: value, ts: max(s.ts, t.begin(now))}, true
}

// mend returns s as it is once a ts left in the future by a wrong clock is brought back to now.
func (t terms) mend(s state, now int64) state {
	if t.ahead(s, now) {
		s.ts = t.begin(now)
	}
	return s
}

// wait returns how long from now it takes until cost tokens can be taken and lowest remain, to the
// microsecond: at now plus the answer take succeeds, a microsecond (a window) before it does not.
func (t terms) wait(s state, now int64, cost, lowest float64) time.Duration {
	s = t.mend(s, now)
	enough := func(n int64) bool { return t.after(s, n)-cost >= lowest }
	if enough(t.elapsed(s, now)) {
		return 0
	}
	estimate := math.Ceil((cost + lowest - s.value) * t.steps / t.rate)
	limit := t.elapsed(s, now) + horizon/t.step + 2 // counted from s.ts, and past the horizon of now
	n := first(int64(min(max(estimate, 1), float64(limit))), limit, enough)
	at := t.begin(s.ts) + n*t.step
	return time.Duration(min(at-now, horizon)) * time.Microsecond
}

// untilFull returns how long from now it takes until the bucket holds its capacity.
func (t terms) untilFull(s state, now int64) time.Duration {
	return t.wait(s, now, t.capacity, 0)
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
