package bucket

import (
	"slices"
	"time"
)

// Rule is the arithmetic of a kind of limit whose tokens do not arrive in steps. A bucket of such a limit is one row, and
// is decided on in Go, under its lock. A Rule is a comparable value: two definitions that say the same are equal.
//
// The terms are those of the limit: Capacity is the most that can be had at once, and Step, Steps and Phase say how long
// a bucket that is left alone takes to be full. A State that another kind has left has other Parts, or none: Value is what
// was left at TS, whatever the kind. No method changes the Parts of the state that it is given.
type Rule interface {
	// Tokens is Terms.Tokens.
	Tokens(t Terms, s State, now int64) float64
	// Take is Terms.Take.
	Take(t Terms, s State, now int64, cost, lowest float64) (State, bool)
	// Wait is Terms.Wait.
	Wait(t Terms, s State, now int64, cost, lowest float64) time.Duration
	// FixClock is Terms.FixClock for a state that is FromFuture.
	FixClock(t Terms, s State, now int64) State
	// Charge returns the state after amount was taken whatever it holds.
	Charge(t Terms, s State, now int64, amount float64) State
	// Credit returns the state after amount, which is positive, was given back. What was taken after until, the begin of a
	// step, is not what it is for.
	Credit(t Terms, s State, now int64, amount float64, until int64) State
	// Fill returns the state of a bucket that is full, after s.
	Fill(t Terms, s State, now int64) State
	// Enter returns the state at the instant at which the terms t begin to hold, after s was held under the terms before.
	Enter(t, before Terms, s State, from int64, change Change) State
	// RefundUntil is Terms.RefundUntil.
	RefundUntil(t Terms, taken int64) int64
	// FreesEarly reports whether tokens may be there before the end of a wait that was told.
	FreesEarly() bool
	// Idle returns how many microseconds after TS a bucket is full for certain, whatever it held, when it was not changed.
	Idle(t Terms) int64
}

// Parts are what a row holds besides Value and TS, for the kinds that need more. They are not changed once they are part of
// a State, so that states share them.
type Parts struct {
	Taken  []float64 // SlidingWindow: see Sliding
	Leases []int64   // Concurrency: the last fencing number, and then number, end and slots of each lease
}

// Equal reports whether the states are the same, with what their Parts hold.
func (s State) Equal(o State) bool {
	if s.Value != o.Value || s.TS != o.TS {
		return false
	}
	if s.Parts == o.Parts {
		return true
	}
	return s.Parts != nil && o.Parts != nil && slices.Equal(s.Parts.Taken, o.Parts.Taken) && slices.Equal(s.Parts.Leases, o.Parts.Leases)
}

// keepingLeases returns a state that the terms have made of the one before. Terms that hold no slots leave the leases as they are,
// as their statements do: another version of a program may hold slots of the limit.
func (t Terms) keepingLeases(after, before State) State {
	if before.Parts == nil || len(before.Parts.Leases) == 0 || t.Holds() {
		return after
	}
	parts := Parts{Leases: before.Parts.Leases}
	if after.Parts != nil {
		parts.Taken = after.Parts.Taken
	}
	after.Parts = &parts
	return after
}

// Credit returns the state of a row after amount, which is positive, was given back under terms with a Rule; see there.
func (t Terms) Credit(s State, now int64, amount float64, until int64) State {
	return t.keepingLeases(t.Rule.Credit(t, t.FixClock(s, now), now, amount, until), s)
}

// Pruning returns terms of steps under which a row is full no earlier than under t. What Value says does not matter to
// them: it may have been left under another capacity.
func (t Terms) Pruning() Terms {
	if t.Rule != nil {
		t.Step, t.Steps, t.Rule = t.Rule.Idle(t), 1, nil
		t.Capacity, t.Rate = 1e100, 1e101 // one step fills it, whatever it owes, and nothing less does
	}
	return t.inLongestWindows()
}
