package store

import (
	"context"
	"errors"
	"slices"

	"github.com/pgratelimit/pgratelimit/internal/batch"
	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Call is one call that takes from buckets, reserves, or looks at them.
type Call struct {
	batch.Call[Call] // the call as its Batcher knows it; unused in a transaction
	Question
	Outcome

	Lease *LeaseChange // what the call does in place of all else, to the bucket of its only ask; nil: nothing

	one     [1]bucket.Answer // the room for Answers when there is one bucket
	traits  bucket.Traits
	way     way     // how it is decided: what choose says, or another if that has left it undecided
	verdict verdict // of that statement

	waits  int    // how many rows it has waited for
	passes bool   // whether others follow in its batch, so that it doesn't wait for long
	rows   []*row // of its asks, in a batch
	oneRow [1]*row

	seq int // its place in the batch, in the order of arrival
}

// Question is the part of a call that its caller sets.
type Question struct {
	Verb    string
	Asks    []bucket.Ask // in the order of locking
	Look    bool         // whether to take nothing
	Reserve Recorder     // makes a record of the tokens, such as a reservation; nil: no record is made
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
	c.Of, c.Awaited = c, c.Reserve != nil
	if !c.Look {
		c.Needs(len(c.Asks), func(i int) bucket.Key { return c.Asks[i].Key })
	}
	return &c.Call
}

// blockedBy returns the call, blocked by row.
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

// waitingFor returns a session whose transactions first wait for row, unless that is nil. waits is how many rows the call has
// waited for, including this one.
func (s *Session) waitingFor(row *bucket.Key, waits int) *Session {
	if s.waitFor == row {
		return s
	}
	waiting := *s
	waiting.waitFor, waiting.waits = row, waits
	return &waiting
}

// Run answers the calls of a batch, and returns the calls that need a row which another transaction holds. A call gets an error if its
// statement failed.
//
// In the first round trip statements take the sum of the costs of each group of calls, all or nothing (see planOf), and read the
// rows of the other calls. That read already refuses some calls. The remaining calls are decided one after the other on locked
// rows, in two more round trips.
//
// A batch for one bucket waits for its row. Other batches wait for a row at most 2 ms, because they hold other rows meanwhile. If waitFor is not
// nil, all calls need that row, and the first lock waits for it.
func (s *Session) Run(ctx context.Context, calls []*Call, waitFor *bucket.Key) (waiting []blocked) {
	if calls = s.releaseFirst(ctx, calls); len(calls) == 0 {
		return nil
	}
	if c := calls[0]; len(calls) == 1 && (waitFor == nil || c.Reserve != nil || !s.Engine().LeavesOutHeld() || s.IsRouted()) {
		return s.runAlone(ctx, c, waitFor)
	}
	if waitFor == nil && askForOne(calls) {
		key := calls[0].Asks[0].Key // a copy: a call that was answered is its caller's again
		waitFor = &key
	}
	for i, c := range calls {
		if s.choose(c); s.relaxed && c.traits.Statement == bucket.SlotStatement {
			c.way = byLocking // a statement of a batch would relax the commit of all
		}
		c.seq = i
	}
	if !slices.ContainsFunc(calls, func(c *Call) bool { return !s.keeps(c) }) {
		return s.decideEach(ctx, s.reserveAll(ctx, calls), waitFor)
	}
	return s.run(ctx, calls, waitFor)
}

// decideEach answers calls of a batch each by itself, in their order. It returns those that need a row which another transaction holds.
func (s *Session) decideEach(ctx context.Context, calls []*Call, waitFor *bucket.Key) (waiting []blocked) {
	for _, c := range calls {
		c.passes = waitFor == nil
		waiting = append(waiting, s.runAlone(ctx, c, waitFor)...)
		c.passes = false
	}
	return waiting
}

// runAlone is Run for a batch of one call.
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

// way is how a call is decided.
type way uint8

const (
	byLocking   way = iota // on locked rows, in Go
	byLooking              // refused by a look, which locks nothing, or else decided on locked rows
	byStatement            // by a function for calls of its form, or in general if that leaves it undecided
	inGeneral              // by decide_rows_1
	looks                  // nothing is taken
	inOwnTx                // in a transaction of the Owner's, if another way is chosen
)

// choose sets how c is decided. No other function chooses.
func (s *Session) choose(c *Call) {
	c.traits = bucket.TraitsOf(c.Asks)
	t := &c.traits
	isFit := decidesInSQL && s.memory == nil && t.Statement != bucket.Locked
	switch {
	case c.Look, s.mode != alone && t.Costless:
		c.way = looks
	case s.keeps(c):
		c.way = s.wayToKeep(c)
	case s.mode == alone && c.Reserve != nil && !s.reserves(c) && (len(c.Asks) == 1 || s.memory != nil || s.isGeneral()):
		c.way = inOwnTx
	case isFit && (s.mode == callersTx || len(c.Asks) == 1 || s.mode == alone && s.waitFor == nil && !s.IsRouted()):
		c.way = byStatement
	case s.isGeneral():
		c.way = inGeneral
	case s.mode == alone && !s.Engine().LeavesOutHeld():
		c.way = byLooking
	default:
		c.way = byLocking
	}
}

// Decide answers c by itself. Outside a transaction it runs again on a conflict. It returns a heldError if c asks for
// several rows and another transaction holds one of them. For a single row it waits, because the call holds no other row meanwhile.
func (s *Session) Decide(ctx context.Context, c *Call) (err error) {
	c.Answers, c.Record = nil, nil
	if s.choose(c); c.way == byStatement {
		err = s.decideByStatement(ctx, c)
	}
	switch {
	case err != nil, c.way == byStatement:
	case c.way == inGeneral && s.keeps(c):
		err = s.reserveInGeneral(ctx, c)
	case c.way == inGeneral:
		found := c.Answers
		err = s.retry(ctx, c.Verb, func() error { return s.takeInGeneral(ctx, c, found) })
	case c.way == looks:
		c.Answers, err = s.Look(ctx, c.Asks, c.one[:0])
	case c.way == inOwnTx:
		return s.RetryTx(ctx, c.Verb, func(tx *Session) error { return tx.Decide(ctx, c) })
	case s.mode != alone: // in which a look would take part in the detection of conflicts
		err = s.takeLocked(ctx, c)
	case c.way == byLooking && s.takeFree(ctx, c):
	case c.way == byLooking:
		err = s.lookAndLock(ctx, c)
	default:
		err = s.lockAndDecide(ctx, c)
	}
	if s.mode == alone || c.Reserve == nil {
		return err
	}
	if err == nil {
		if !c.Claim() { // its caller has left: nothing is kept
			return context.Canceled
		}
		if c.Record != nil { // a function has kept it
			return nil
		}
		if c.record(); c.Record != nil {
			err = s.save(ctx, bucket.NewPage(c.Asks), c.Record)
		}
	}
	return s.OrSpoil(ctx, err)
}

// record makes the record of what c took, if c was allowed.
func (c *Call) record() {
	c.Record = nil
	if c.Reserve != nil && bucket.AllAllowed(c.Answers) {
		c.Record = c.Reserve.Record(c.Asks, c.Answers)
	}
}

// lookAndLock refuses c when a look is enough, which locks nothing, and else decides on it.
func (s *Session) lookAndLock(ctx context.Context, c *Call) error {
	if refused, err := s.lookAndRefuse(ctx, c); refused || err != nil {
		return err
	}
	return s.lockAndDecide(ctx, c)
}

// takeFree decides on c without a transaction, if its rows are in memory and no transaction holds one.
func (s *Session) takeFree(ctx context.Context, c *Call) (done bool) {
	memory, ok := s.memory.(interface {
		ChangeFree(u *Unit, p *bucket.Page, change func()) (done bool)
	})
	if !ok || ctx.Err() != nil {
		return false
	}
	p := bucket.NewPage(c.Asks)
	var mended []bucket.Key
	done = memory.ChangeFree(&s.Unit, p, func() {
		mended = p.FromFuture()
		p.SetNow(c.Asks)
		p.Settle(c.Asks)
		if c.Claim() {
			c.Answers = p.Take(c.Asks, c.one[:0])
		}
	})
	for _, row := range mended {
		s.owner.Mended(ctx, row.Name)
	}
	return done
}

// lookAndRefuse refuses c if a look is enough for that.
func (s *Session) lookAndRefuse(ctx context.Context, c *Call) (refused bool, err error) {
	err = s.retry(ctx, c.Verb, func() (err error) {
		c.Answers, err = s.Look(ctx, c.Asks, c.one[:0])
		return err
	})
	return err == nil && c.isRefused(), err
}

// lockAndDecide decides on c on locked rows, in a transaction of its own. If another transaction holds
// one of them, a look may still refuse c: a refusal waits for no row.
func (s *Session) lockAndDecide(ctx context.Context, c *Call) error {
	err := s.RetryTx(ctx, c.Verb, func(tx *Session) error { return tx.decideOneLocked(ctx, c) })
	var held *heldError
	if s.waitFor == nil && c.Reserve == nil && errors.As(err, &held) {
		if refused, lookErr := s.lookAndRefuse(ctx, c); refused || lookErr != nil {
			return lookErr
		}
	}
	return err
}

// decideOneLocked decides on c on locked rows, in the transaction of s.
func (s *Session) decideOneLocked(ctx context.Context, c *Call) error {
	waiting, err := s.decideLocked(ctx, []*Call{c})
	if err == nil && len(waiting) > 0 {
		err = &heldError{row: waiting[0].Row}
	}
	return err
}

// decideLocked locks the rows that calls need and are free, and decides on the calls that need no other. It returns
// the others.
func (s *Session) decideLocked(ctx context.Context, calls []*Call) (waiting []blocked, err error) {
	asks := make([][]bucket.Ask, len(calls))
	for i, c := range calls {
		asks[i] = c.Asks
	}
	p, err := s.lockFree(ctx, false, asks...)
	if err != nil {
		return nil, err
	}
	var made []Record
	for _, c := range calls {
		if row, held := p.Held(c.Asks); held {
			waiting = append(waiting, c.blockedBy(row))
			continue
		}
		if c.Claim() {
			c.Answers = p.Take(c.Asks, c.one[:0])
			if c.record(); c.Record != nil {
				made = append(made, c.Record)
			}
		}
	}
	if err := s.relax(ctx, p, made...); err != nil {
		return nil, err
	}
	return waiting, s.save(ctx, p, made...)
}
