package bucket

import (
	"slices"
	"time"
)

// Kind is the arithmetic of one kind of limit on one row. Token buckets and fixed windows are Steps; Calendar, Sliding
// and Concurrent embed Steps and replace the methods in which they differ. A Kind is a comparable value: equal
// definitions have equal kinds.
//
// The terms are the terms in effect for one row. A State that another kind wrote has other Parts, or none. For every
// kind, its Value is the number of tokens left at TS. No method changes the Parts of the state that it is given.
type Kind interface {
	// Tokens returns the tokens that the row holds at now. Negative tokens are owed by reservations.
	Tokens(t Terms, s State, now int64) float64
	// Take returns the state after cost tokens are taken at now, if at least lowest remain. Otherwise it returns s and
	// false.
	Take(t Terms, s State, now int64, cost, lowest float64) (State, bool)
	// Wait returns how long it takes from now until Take succeeds, to the microsecond. The clock of s was fixed.
	Wait(t Terms, s State, now int64, cost, lowest float64) time.Duration
	// FixClock returns a state from the future as if it was written at now.
	FixClock(t Terms, s State, now int64) State
	// Charge returns the state after amount was taken, even below zero. The clock of s was fixed.
	Charge(t Terms, s State, now int64, amount float64) State
	// Credit returns the state after amount was given back, up to the capacity or most, if that is higher. If the step of
	// until is over, it gives nothing and returns false.
	Credit(t Terms, s State, now int64, amount, most float64, until int64) (State, bool)
	// Fill returns the state of a full bucket at now, after s, whatever its TS is.
	Fill(t Terms, s State, now int64) State
	// Enter returns the state at the instant at which the terms t take effect, after s under the terms before, of the same
	// kind. The change is no Reset.
	Enter(t, before Terms, s State, from int64, change Change) State
	// CreditUntil returns the begin of the last step in which tokens that were taken at an instant may be given back.
	CreditUntil(t Terms, taken int64) int64

	// Statement returns which statement decides on rows of the kind.
	Statement() Statement
	// Pruning returns terms of steps under which a row with any Value is full no earlier than under t.
	Pruning(t Terms) Terms
	// Owes reports whether a bucket can owe tokens, to reservations or as a pool.
	Owes() bool
}

// Statement is a group of statements of Postgres that decide on rows of some kinds as their methods do, to the last
// bit.
type Statement uint8

const (
	Locked          Statement = iota // none: the kind decides, on locked rows
	StepStatement                    // take_1, decide_1, and the statements of a batch
	WindowStatement                  // slide_1
	SlotStatement                    // acquire_1
)

// Parts are the further numbers of a row besides Value and TS, for the kinds that need them. Parts of a State do not
// change, so states can share them.
type Parts struct {
	Taken []float64 // SlidingWindow: see Sliding
	// Concurrency: the last fencing number, and then number, end and slots of each lease, if they were read
	Leases []int64
}

// Equal reports whether the states are the same, with what their Parts hold.
func (s State) Equal(o State) bool {
	if s.Value != o.Value || s.TS != o.TS || s.Capacity != o.Capacity {
		return false
	}
	if s.Parts == o.Parts {
		return true
	}
	return s.Parts != nil && o.Parts != nil && slices.Equal(s.Parts.Taken, o.Parts.Taken) &&
		slices.Equal(s.Parts.Leases, o.Parts.Leases)
}
