package bucket

import "time"

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

// Terms are a policy as the statements see it: numbers, and the Kind of the limit, which says what the numbers mean.
//
// Every now, here and below, is an instant in microseconds since 1970, on the database's clock.
type Terms struct {
	Kind       Kind
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
	run        Run     // the windows that Step and Phase are of, if the Kind is a Calendar

	Era  int32  // which of the Eras they are
	Eras *Eras  // the terms that hold at other instants; nil: these hold at all
	Seed uint64 // what Phase is derived from in each era
}

// State is a bucket's row: Value tokens were held at TS, microseconds since 1970.
type State struct {
	Value float64
	TS    int64
	Parts *Parts // what more the Kind keeps; nil where tokens arrive in steps
}

// Begin returns the instant at which the step that holds now began, and for instants before the first step when
// that will. A step that had begun before the terms did begins with them.
func (t Terms) Begin(now int64) int64 {
	return max(t.Kind.Begin(t, now, 0), t.Eras.since(t.Era))
}

// On returns the terms with the steps of an instant. Another era may be in effect then: see At.
func (t Terms) On(now int64) Terms { return t.Kind.On(t, now) }

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
	if s.TS <= now { // the most frequent case
		return false
	}
	step := t.Kind.Begin(t, now, 1) - t.Kind.Begin(t, now, 0)
	return s.TS > t.Begin(now)+step+ClockTolerance.Microseconds()
}

// FixClock returns s as it is once a TS that a wrong clock left in the future is brought back to now.
func (t Terms) FixClock(s State, now int64) State {
	if !t.FromFuture(s, now) {
		return s
	}
	return t.Kind.FixClock(t, s, now)
}

// Horizon is the longest wait that is reported, in microseconds. Waits up to twice MaxSpan occur; only
// a row written under another policy can be further from recovery.
const Horizon = int64(250 * 365 * 24 * time.Hour / time.Microsecond)

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
