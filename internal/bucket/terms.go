package bucket

import (
	"math"
	"time"
)

// The numbers of the algebra are kept where float64 arithmetic on them is exact to well under a token
// and no sum of microseconds overflows.
const (
	// MaxTokens and MinTokens bound every number of tokens that a policy names.
	MaxTokens = 1e12
	MinTokens = 1e-9

	// MinCostShare is the smallest cost, as a share of the capacity, that the arithmetic keeps exact to
	// about a thousandth.
	MinCostShare = 0x1p-40

	// MaxSpan bounds a period, the time an empty bucket takes to fill, and the time a debt takes to be
	// repaid. A bucket that fills within it gains more with every microsecond than a rounding loses.
	MaxSpan = 36525 * 24 * time.Hour

	// MinInstant and MaxInstant are the years 1 and 9999, in microseconds since 1970. A row holds no instant
	// outside of them.
	MinInstant = int64(-62135596800000000)
	MaxInstant = int64(253402300799999999)

	// LongAgo is the start of 1900, in microseconds since 1970: a bucket that held anything then is full, whatever
	// its terms, and numbers of JavaScript still hold the microseconds since.
	LongAgo = int64(-2208988800000000)

	// ClockTolerance is how far ts may be ahead of now before it is taken for the mark of a wrong clock.
	// It has to exceed any wait for a row lock behind which the row was written again: a statement that waited has an older now than the row.
	ClockTolerance = time.Minute
)

// Terms are a policy as the statements see it. Tokens arrive in steps: a fixed window's step is its
// period, a token bucket's is a microsecond, and that is all the difference between the two.
//
//	tokens(now) = min(Capacity, Value + n * Rate / Steps)
//	n           = steps begun after TS and up to now
//
// Every now, here and below, is an instant in microseconds since 1970, on the database's clock.
type Terms struct {
	Capacity   float64 // the most tokens that a bucket holds
	Rate       float64 // tokens that arrive each period
	Steps      float64 // steps in a period
	Step       int64   // a step's length in microseconds
	Phase      int64   // the instant the first step begins, less than a Step after MinInstant
	MaxDebt    float64 // how far below zero a reservation may go
	Reserves   bool    // whether reservations are taken at all
	PhaseByKey bool    // whether Phase is derived from the key
	OfRow      bool    // whether they are of one of the rows that a bucket is spread over
	Shards     int32   // the rows a bucket is spread over
	Prefetch   int64   // how long a process may keep tokens that it took ahead, in microseconds; 0: it takes none
	Rule       Rule    // what decides in place of steps; nil: steps
	Calendar   Calendar
	run        Run // the windows of the Calendar that Step and Phase are of

	Era  int32  // which of the Eras they are
	Eras *Eras  // the terms that hold at other instants; nil: these hold at all
	Seed uint64 // what Phase is derived from in each era
}

// State is a bucket's row: Value tokens were held at TS, microseconds since 1970.
type State struct {
	Value float64
	TS    int64
	Parts *Parts // what more a Rule keeps; nil where tokens arrive in steps
}

// Begin returns the instant at which the step that holds now began, and for instants before the first step when
// that will. A step that had begun before the terms did begins with them.
func (t Terms) Begin(now int64) int64 {
	return max(t.step(now), t.since())
}

// step is Begin, whenever the terms began.
func (t Terms) step(now int64) int64 {
	if t.isBeside(now) {
		return t.stepAfter(now, 0)
	}
	return t.Phase + (now-t.Phase)/t.Step*t.Step
}

// isBeside reports whether the Step and the Phase are of other windows of the calendar than those at an instant.
func (t *Terms) isBeside(at int64) bool {
	return t.Calendar.Zone != nil && (at < t.run.From || at >= t.run.Until)
}

// stepAfter returns the begin of the n-th step after the one that holds an instant.
func (t Terms) stepAfter(at, n int64) int64 {
	if !t.isBeside(at) {
		if begin := t.step(at) + n*t.Step; !t.isBeside(begin - 1) {
			return begin
		}
	}
	return t.Calendar.begin(t.Calendar.index(at) + n)
}

// since returns the instant at which the era of the terms begins.
func (t Terms) since() int64 {
	if t.Eras == nil {
		return math.MinInt64
	}
	return t.Eras.eras[t.Era].From
}

// NeedsSeed reports whether the terms, or those that hold at another instant, have a phase that is derived from the key.
func (t Terms) NeedsSeed() bool { return t.PhaseByKey || t.Eras != nil && t.Eras.seeded }

// Full is the state of a bucket that has no row.
func (t Terms) Full(now int64) State {
	return State{Value: t.Capacity, TS: t.Begin(now)}
}

// Tolerance is how far, in microseconds, TS may be ahead of the current step's begin.
func (t Terms) Tolerance() int64 {
	return t.Step + ClockTolerance.Microseconds()
}

// FromFuture reports whether s was written by a clock that was wrong: its TS is ahead of now by more than the Tolerance.
func (t Terms) FromFuture(s State, now int64) bool {
	if t.isBeside(now) {
		t = t.OnWindows(now)
	}
	return s.TS > t.Begin(now)+t.Tolerance()
}

// FixClock returns s as it is once a TS that a wrong clock left in the future is brought back to now. It keeps the value,
// and credits no time.
func (t Terms) FixClock(s State, now int64) State {
	if !t.FromFuture(s, now) {
		return s
	}
	if t.Rule != nil {
		return t.Rule.FixClock(t, s, now)
	}
	s.TS = t.Begin(now)
	return s
}

// Before returns the state before cost was taken, which has led to s in a decision at now.
func (t Terms) Before(s State, now int64, cost float64) State {
	if t.Rule != nil {
		return t.Rule.Charge(t, s, now, -cost)
	}
	s.Value += cost
	return s
}

// Tokens returns what the bucket holds at now: negative while reservations are owed. Nothing arrives before TS, so a
// clock that steps back takes nothing away.
func (t Terms) Tokens(s State, now int64) float64 {
	if t.Rule != nil {
		return t.Rule.Tokens(t, s, now)
	}
	return t.after(s, t.elapsed(s, now))
}

// after returns the tokens s has grown to when n more steps have begun. The conversions keep the compiler
// from fusing operations, so that the result is the same to the last bit on every machine and in Postgres.
func (t Terms) after(s State, n int64) float64 {
	arrived := float64(float64(n)*t.Rate) / t.Steps
	return min(t.Capacity, float64(s.Value+arrived))
}

// elapsed returns the number of steps that began after s.TS, up to now; zero when TS is not yet reached.
func (t Terms) elapsed(s State, now int64) int64 {
	if t.isBeside(s.TS) || t.isBeside(now) {
		return t.windowsBetween(s.TS, now)
	}
	return (max(t.Begin(now)-s.TS, 0) + t.Step - 1) / t.Step // ceil: a TS inside a step counts as its begin
}

// Take returns the state after cost tokens are taken at now, and whether at least lowest remain. When
// they do not, the state is the one passed in. It mirrors bucket_take.sql, which is what decides
// where the row was not locked before.
func (t Terms) Take(s State, now int64, cost, lowest float64) (State, bool) {
	if t.Rule != nil {
		next, allowed := t.Rule.Take(t, s, now, cost, lowest)
		return t.keepingLeases(next, s), allowed
	}
	value := t.Tokens(s, now) - cost
	if !(value >= lowest) {
		return s, false
	}
	next := State{Value: value, TS: t.Begin(now)}
	if !t.FromFuture(s, now) {
		next.TS = max(s.TS, next.TS)
	}
	return t.keepingLeases(next, s), true
}

// Horizon is the longest wait that is reported, in microseconds. Waits up to twice MaxSpan occur; only
// a row written under another policy can be further from recovery.
const Horizon = int64(250 * 365 * 24 * time.Hour / time.Microsecond)

// Wait returns how long from now it takes until cost tokens can be taken and lowest remain, to the
// microsecond: at now plus the answer Take succeeds, a microsecond (a window) before it does not.
func (t Terms) Wait(s State, now int64, cost, lowest float64) time.Duration {
	s = t.FixClock(s, now)
	if t.Rule != nil {
		return t.Rule.Wait(t, s, now, cost, lowest)
	}
	return t.waitFrom(s, now, t.elapsed(s, now), cost, lowest)
}

// waitFrom is Wait where tokens arrive in steps, so many of which have begun up to now since a TS that is no wrong clock's.
func (t Terms) waitFrom(s State, now, elapsed int64, cost, lowest float64) time.Duration {
	enough := func(n int64) bool { return t.after(s, n)-cost >= lowest }
	if enough(elapsed) {
		return 0
	}
	estimate := math.Ceil((cost + lowest - s.Value) * t.Steps / t.Rate)
	limit := elapsed + Horizon/t.Step + 2 // counted from s.TS, and past the horizon of now
	n := first(int64(min(max(estimate, 1), float64(limit))), limit, enough)
	if n == limit {
		return time.Duration(Horizon) * time.Microsecond
	}
	return time.Duration(min(t.stepAfter(s.TS, n)-now, Horizon)) * time.Microsecond
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

// Outlook is what an answer says of the bucket from its instant on.
type Outlook struct {
	State      State   // with a wrong clock in it put right
	Rows       []State // so, too, when the bucket is spread over several
	Tokens     float64
	RetryAfter time.Duration // until the ask is allowed: 0 when it was
	FullAfter  time.Duration
}

// Outlook returns what the answer to a call for cost tokens, of which lowest have to remain, says of the bucket.
func (t Terms) Outlook(r *Answer, cost, lowest float64) Outlook {
	o := Outlook{State: t.FixClock(r.State, r.Now)}
	if t.Rule == nil && r.Rows == nil { // as mostly
		elapsed := t.elapsed(o.State, r.Now)
		o.Tokens, o.FullAfter = t.after(o.State, elapsed), t.waitFrom(o.State, r.Now, elapsed, t.Capacity, 0)
		if !r.Allowed {
			o.RetryAfter = t.waitFrom(o.State, r.Now, elapsed, cost, lowest)
		}
		return o
	}
	o.Rows, o.Tokens, o.FullAfter = t.FixClocks(r.Rows, r.Now), t.Tokens(o.State, r.Now), t.waitFor(r, t.Capacity, 0)
	if !r.Allowed {
		o.RetryAfter = t.waitFor(r, cost, lowest)
	}
	return o
}
