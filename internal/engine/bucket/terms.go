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

	// MaxSpan bounds a period, the time an empty bucket takes to fill, and the time that owed tokens take to be
	// repaid. A bucket that fills within it gains more with every microsecond than a rounding loses.
	MaxSpan = 36525 * 24 * time.Hour

	// MinInstant and MaxInstant are the years 1 and 9999, in microseconds since 1970. A row holds no instant
	// outside of them.
	MinInstant = int64(-62135596800000000)
	MaxInstant = int64(253402300799999999)

	// LongAgo is the start of 1900, in microseconds since 1970. Under all terms, a bucket that was used then is full now.
	// Numbers of JavaScript still hold the microseconds since.
	LongAgo = int64(-2208988800000000)

	// ClockTolerance is how far ts may be ahead of now before it is taken for the mark of a wrong clock. It must exceed
	// any wait for a row lock, because a statement that waited may find a row that is newer than its now.
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

	Windows      Windows // windows whose lengths differ; nil: all are a Step long
	since, until int64   // the span of Step and Phase, if there are Windows

	Revision  int32      // which of the Revisions they are
	Revisions *Revisions // the terms that hold at other instants; nil: these hold at all
	Seed      uint64     // what Phase is derived from in each revision
}

// State is a bucket's row: Value tokens were held at TS, microseconds since 1970, of a full bucket with Capacity. So
// Capacity - Value were used. See Terms.Carry.
type State struct {
	Value    float64
	TS       int64
	Capacity float64
	Parts    *Parts // more data of the Kind; nil if tokens arrive in steps
}

// Full is the state of a bucket that has no row.
func (t Terms) Full(now int64) State {
	return State{Value: t.Capacity, TS: t.Begin(now), Capacity: t.Capacity}
}

// FromFuture reports whether s was written by a clock that was wrong. So a window that was used too early delays the
// next tokens by at most its period and the tolerance.
func (*Terms) FromFuture(s State, now int64) bool { return s.TS > now+ClockTolerance.Microseconds() }

// FixClock returns s with TS set to now, if a wrong clock left it in the future.
func (t *Terms) FixClock(s State, now int64) State {
	if !t.FromFuture(s, now) {
		return s
	}
	return t.Kind.FixClock(*t, s, now)
}

// wait returns how long it takes from now until cost tokens can be taken and lowest remain.
func (t *Terms) wait(s State, now int64, cost, lowest float64) time.Duration {
	return t.Kind.Wait(*t, t.FixClock(s, now), now, cost, lowest)
}

// Horizon is the longest wait that is reported, in microseconds. Waits up to twice MaxSpan occur; only
// a row written under another policy can be further from recovery.
const Horizon = int64(250 * 365 * 24 * time.Hour / time.Microsecond)
