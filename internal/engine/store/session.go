package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/batch"
	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/pgerr"
)

// Call is one call that takes from buckets, reserves, or looks at them.
type Call struct {
	batch.Call[Call] // the call as its Batcher knows it; unused in a transaction
	Question
	Outcome

	// What the call does in place of all else, to the bucket of its only ask; nil: nothing.
	Lease      *LeaseChange
	Settlement *Settlement
	changes    []change // of its asks, which nothing refuses; nil: it takes

	one     [1]bucket.Answer // the room for Answers when there is one bucket
	traits  bucket.Traits
	way     way     // how it is decided: what choose says, or another if that has left it undecided
	verdict verdict // of that statement

	waits  int    // how many rows it has waited for
	passes bool   // whether others follow in its batch, so that it doesn't wait for long
	rows   []*row // of its asks, in a batch
	oneRow [1]*row
	turn   turn
	heldBy *bucket.Key // the row that it's to wait for, unless a look refuses it; nil: none

	inquiry *inquiry   // when it's decided in turn
	held    *heldError // what that says

	seq int // its place in the batch, in the order of arrival
}

// Question is the part of a call that its caller sets.
type Question struct {
	Verb    string
	Asks    []bucket.Ask // in the order of locking
	Look    bool         // whether to take nothing
	Reserve Recorder     // makes a record of the tokens, such as a reservation; nil: no record is made
	Leases  bool         // whether it takes slots, which the caller must release; its context has the timeout
}

// Outcome is the answer to a call.
type Outcome struct {
	Answers []bucket.Answer
	Record  Record // the record that was made
}

// blocked is a call that cannot be answered yet, because another transaction holds a row that it needs.
type blocked = batch.Blocked[Call]

// Queueable returns the facts about the call that its Batcher needs.
func (c *Call) Queueable() *batch.Call[Call] {
	c.Of, c.Awaited, c.OwnTime = c, c.Reserve != nil || c.Settlement != nil || c.Leases, c.Leases
	if !c.Look {
		c.Needs(len(c.Asks), func(i int) bucket.Key { return c.Asks[i].Key })
	}
	return &c.Call
}

func (c *Call) blockedBy(row bucket.Key) blocked {
	c.waits++
	return blocked{Call: &c.Call, Row: row}
}

// Session is the store on a pool or in a transaction. The one on a pool is safe for concurrent use.
type Session struct {
	Unit
	owner Owner
}

// OnPool returns the session whose statements are each a transaction of its own.
func (s *Store) OnPool(pool Conn, owner Owner) Session {
	return Session{Unit{Store: s, conn: pool, memory: s.engineOf(pool), mode: alone}, owner}
}

// InTx returns the session whose statements are part of the caller's transaction. queue may be nil.
func (s *Store) InTx(tx Conn, owner Owner, queue Queue) Session {
	return Session{Unit{Store: s, conn: tx, memory: s.engineOf(tx), mode: callersTx, queue: queue}, owner}
}

// BoundTo returns the session in a transaction that the owner began for s.
func (s *Session) BoundTo(tx Conn, owner Owner) Session {
	bound := Session{s.Unit, owner}
	bound.conn, bound.memory, bound.mode = tx, s.engineOf(tx), ownTx
	return bound
}

// IsRouted reports whether statements are known to have to name one row each.
func (s *Store) IsRouted() bool { return s.layout.Load() == layoutDistributed }

// IsPlain reports whether it is known that statements may name several rows.
func (s *Store) IsPlain() bool { return s.layout.Load() == layoutPlain }

// IsOnPool reports whether each statement is a transaction of its own.
func (u *Unit) IsOnPool() bool { return u.mode == alone }

// KnowsLayout reports whether it is known whether statements are to name one row each.
func (s *Store) KnowsLayout() bool { return s.layout.Load() != layoutUnknown }

// Engine returns the engine that keeps the rows.
func (u *Unit) Engine() Engine {
	if u.memory != nil {
		return u.memory
	}
	return postgres{}
}

// waitingFor returns a session whose transactions first wait for row, unless that is nil. waits is how many rows the
// call has waited for, including this one.
func (s *Session) waitingFor(row *bucket.Key, waits int) *Session {
	if s.waitFor == row {
		return s
	}
	waiting := *s
	waiting.waitFor, waiting.waits = row, waits
	return &waiting
}

// Run answers the calls of a batch, and returns the calls that need a row which another transaction holds. A call gets
// an error if its statement failed.
//
// A round trip takes the sum of the costs of each group of calls, all or nothing (see planOf), and reads the rows of
// the other calls. That refuses some of these. If it has taken nothing for a group, a second one takes for those of its
// calls for which there is enough. What is left then is decided by decide_rows_1, in turn.
//
// A batch for one bucket waits for its row. Other batches wait for a row at most 2 ms, because they hold other rows
// meanwhile. If waitFor is not nil, all calls need that row, and the first statement waits for it.
func (s *Session) Run(ctx context.Context, calls []*Call, waitFor *bucket.Key) (waiting []blocked) {
	calls = slices.DeleteFunc(calls, func(c *Call) bool { return c.Leases && !c.Claim() })
	switch calls = s.releaseFirst(ctx, s.settleFirst(ctx, calls)); len(calls) {
	case 0:
		return nil
	case 1:
		return s.runAlone(ctx, calls[0], waitFor)
	}
	if waitFor == nil && askForOne(calls) {
		key := calls[0].Asks[0].Key // a copy: a call that was answered is its caller's again
		waitFor = &key
	}
	if slices.ContainsFunc(calls, (*Call).isChange) {
		return s.runChanges(ctx, calls, waitFor)
	}
	for i, c := range calls {
		if s.choose(c); s.relaxed && c.traits.Statement == bucket.SlotStatement {
			c.way = inGeneral // a statement of a batch would relax the commit of all
		}
		c.seq = i
	}
	switch first, later := s.splitReserves(calls); {
	case later != nil:
		return append(s.Run(ctx, first, waitFor), s.Run(ctx, later, waitFor)...)
	case s.reserves(calls[0]):
		return s.reserveAll(ctx, calls, waitFor)
	}
	return s.run(ctx, calls, waitFor, 1)
}

// splitReserves splits the calls of a batch so that the first are all Reserves, or none is. Calls that share a bucket
// keep their order.
func (s *Session) splitReserves(calls []*Call) (first, later []*Call) {
	reserving := s.reserves(calls[0])
	if !slices.ContainsFunc(calls, func(c *Call) bool { return s.reserves(c) != reserving }) {
		return calls, nil
	}
	left := make(map[bucket.Key]bool)
	return split(calls, func(c *Call) bool {
		isFirst := s.reserves(c) == reserving && !slices.ContainsFunc(c.Asks, func(a bucket.Ask) bool { return left[a.Key] })
		for i := range c.Asks {
			left[c.Asks[i].Key] = left[c.Asks[i].Key] || !isFirst
		}
		return isFirst
	})
}

// split returns the calls of a batch for which is returns true, and the others.
func split(calls []*Call, is func(*Call) bool) (these, others []*Call) {
	for _, c := range calls {
		if is(c) {
			these = append(these, c)
		} else {
			others = append(others, c)
		}
	}
	return these, others
}

func (c *Call) isChange() bool { return c.changes != nil }

// runChanges is Run for a batch in which calls make changes, which are made first.
func (s *Session) runChanges(ctx context.Context, calls []*Call, waitFor *bucket.Key) (waiting []blocked) {
	changing, others := split(calls, (*Call).isChange)
	// so that batches of two processes seldom meet in opposite orders
	slices.SortStableFunc(changing, func(a, b *Call) int { return a.Asks[0].Key.Compare(b.Asks[0].Key) })
	waiting = s.decideInTurn(ctx, changing, waitFor)
	if len(others) > 0 {
		waiting = append(waiting, s.Run(ctx, others, waitFor)...)
	}
	return waiting
}

func (s *Session) runAlone(ctx context.Context, c *Call, waitFor *bucket.Key) []blocked {
	if waitFor != nil {
		s = s.waitingFor(waitFor, c.waits)
	}
	err := s.Decide(ctx, c)
	if err != nil { // what errors.As needs is an allocation
		var held *heldError
		if errors.As(err, &held) {
			return []blocked{c.blockedBy(held.row)}
		}
		if waitFor != nil {
			err = waitedFor(err, *waitFor)
		}
	}
	c.Answer(err)
	return nil
}

type way uint8

const (
	looks       way = iota // nothing is taken
	inMemory               // by an engine whose rows are decided on in Go
	byStatement            // by a function for calls of its form, or in general if that leaves it undecided
	inGeneral              // by decide_rows_1
	byReserve              // by reserve_1 or reserve_rows_1: see reserve
)

// choose sets how c is decided. No other function chooses.
func (s *Session) choose(c *Call) {
	c.traits, c.turn, c.heldBy = bucket.TraitsOf(c.Asks), unknown, nil
	t := &c.traits
	switch {
	case c.isChange():
		c.way = inGeneral
	case c.Look, s.mode != alone && t.Costless && c.Reserve == nil:
		c.way = looks
	case s.memory != nil:
		c.way = inMemory
	case s.reserves(c):
		c.way = byReserve
	case t.Statement != bucket.Locked &&
		(s.mode == callersTx || len(c.Asks) == 1 || s.mode == alone && s.waitFor == nil && !s.IsRouted()):
		c.way = byStatement
	default:
		c.way = inGeneral
	}
}

// Decide answers c by itself. Outside a transaction it runs again on a conflict. It returns a heldError if c asks for
// several rows and another transaction holds one of them. For a single row it waits, because the call holds no other
// row meanwhile.
func (s *Session) Decide(ctx context.Context, c *Call) (err error) {
	c.Answers, c.Record = nil, nil
	if s.choose(c); c.way == byStatement {
		err = s.decideByStatement(ctx, c)
	}
	switch {
	case err != nil, c.way == byStatement:
	case c.way == byReserve:
		err = s.reserveAlone(ctx, c)
	case c.way == inGeneral:
		found := c.Answers
		err = s.retry(ctx, c.Verb, func() error { return s.takeInGeneral(ctx, c, found) })
	case c.way == looks:
		c.Answers, err = s.Look(ctx, c.Asks, c.one[:0])
	default:
		err = s.decideInMemory(ctx, c)
	}
	if s.mode == alone || c.Reserve == nil {
		return err
	}
	if err == nil && !c.Claim() { // its caller has left: nothing is kept
		return context.Canceled
	}
	return s.OrSpoil(ctx, err)
}

// A call outside a transaction doesn't wait for the row of a bucket while it holds others. Another transaction may hold
// that row for long, and may need the others. If it needs a row that isn't free, it ends, and starts again: it waits
// for that row before it locks others. Only the row of a reservation is locked before the row of its bucket.

const (
	// shortWait is how long a statement that may hold rows waits for another: as long as a transaction that is about to
	// commit takes.
	shortWait = 2 * time.Millisecond
	// manyWaits is the number of rows after whose waits a call also waits while it holds other rows, because all of them
	// are in use and never free at the same time. It waits for each for up to leastLongWait, then twice that, and so on up
	// to mostLongWait.
	manyWaits     = 3
	leastLongWait = 20 * time.Millisecond
	mostLongWait  = time.Second

	// maxWaits bounds the rows that a call waits for, which the time for a call bounds first.
	maxWaits = 10_000
)

// heldError says that another transaction holds a row which a call needs. Nothing was done. The call runs again, and
// waits for that row first.
type heldError struct {
	row bucket.Key
	err error // the lock timeout of a statement that waits for rows only so long; nil: the row was left out
}

func (e *heldError) Error() string { return "another transaction holds the row of a bucket" }

func (e *heldError) Unwrap() error { return e.err }

// WaitError is the error of a call that had to wait for a row.
type WaitError struct {
	error
	Row bucket.Key
}

func (e *WaitError) Unwrap() error { return e.error }

// waitedFor returns err as a WaitError when the wait for row was too long for the lock_timeout of the session.
func waitedFor(err error, row bucket.Key) error {
	if pgerr.Code(err) == codeLockNotAvailable {
		return &WaitError{err, row}
	}
	return err
}

// RetryHeld runs fn until it needs no row that another transaction holds, or ctx ends. In a transaction it runs fn
// once: the owner of the transaction retries.
func (s *Session) RetryHeld(ctx context.Context, fn func(s *Session) error) error {
	if s.mode != alone {
		return fn(s)
	}
	for n := 1; ; n++ {
		err := fn(s)
		if err == nil { // as mostly, and what errors.As needs is an allocation
			return nil
		}
		var held *heldError
		switch {
		case !errors.As(err, &held):
			if s.waitFor != nil {
				err = waitedFor(err, *s.waitFor)
			}
			return err
		case ctx.Err() != nil:
			return fmt.Errorf("gave up after %d attempts: %w (last: %w)", n, ctx.Err(), err)
		case n >= maxWaits:
			return fmt.Errorf("%w: gave up after %d waits for rows: %w", ErrContended, n, err)
		}
		s = s.waitingFor(&held.row, n)
	}
}

// waitForOthers returns how long a call waits for each row but the first.
func (u *Unit) waitForOthers() time.Duration {
	if u.waits < manyWaits {
		return shortWait
	}
	return min(leastLongWait<<min(u.waits-manyWaits, 10), mostLongWait)
}

// Awaited returns the place among rows of the row that the unit waits for before it locks others: the first by default.
func (u *Unit) Awaited(rows []bucket.Ask) int {
	return max(0, slices.IndexFunc(rows, func(a bucket.Ask) bool { return u.waitFor != nil && a.Key == *u.waitFor }))
}
