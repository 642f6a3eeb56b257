package store

import (
	"context"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// Pages is an Engine on whose rows Go decides, on a bucket.Page, as there is no server that could.
//
// An error of Lock fails the transaction, as the error of a statement does.
type Pages interface {
	Engine
	// Lock locks the rows of a page to the end of the transaction, in their order, and puts their states. With mark, it
	// first marks the place that Undo goes back to.
	Lock(ctx context.Context, u *Unit, p *bucket.Page, mark bool) error
	// ChangeFree puts the rows of a page, has change change it, and saves that, without a transaction. It does nothing if
	// one holds a row.
	ChangeFree(u *Unit, p *bucket.Page, change func()) (done bool)
	// Save writes the changed rows of a page, and new records.
	Save(ctx context.Context, u *Unit, p *bucket.Page, made ...Record) error
	// Undo goes back to the mark of Lock.
	Undo(ctx context.Context, u *Unit) error
}

// decideOnPage decides on c: at once if no transaction holds one of its rows, and else in a transaction. A refusal
// waits for no row.
func (s *Session) decideOnPage(ctx context.Context, c *Call) error {
	switch {
	case s.mode != alone:
		return s.takeLocked(ctx, c)
	case c.Reserve == nil && ctx.Err() == nil && s.takeFree(ctx, c):
		return nil
	case c.Reserve == nil:
		if refused, err := s.lookAndRefuse(ctx, c); refused || err != nil {
			return err
		}
	}
	return s.RetryTx(ctx, c.Verb, func(tx *Session) error { return tx.Decide(ctx, c) })
}

// takeFree decides on c without a transaction, if none holds one of its rows.
func (s *Session) takeFree(ctx context.Context, c *Call) (done bool) {
	p := bucket.NewPage(c.Asks)
	var mended []bucket.Key
	done = s.memory.ChangeFree(&s.Unit, p, func() {
		mended = p.FromFuture()
		p.SetNow(c.Asks)
		p.Settle(c.Asks)
		if c.Claim() {
			c.Answers = p.Take(c.Asks, c.one[:0])
		}
	})
	for _, row := range mended {
		s.owner.ClockRepaired(ctx, row.Name)
	}
	return done
}

// lookAndRefuse refuses c if a look is enough for that.
func (s *Session) lookAndRefuse(ctx context.Context, c *Call) (refused bool, err error) {
	c.Answers, err = s.Look(ctx, c.Asks, c.one[:0])
	return err == nil && c.isRefused(), err
}

// lock locks and reads the rows of asks, in the transaction of s.
func (s *Session) lock(ctx context.Context, mark bool, asks []bucket.Ask) (*bucket.Page, error) {
	p := bucket.NewPage(asks)
	s.EnterQueue(ctx, p.Rows)
	if err := s.memory.Lock(ctx, &s.Unit, p, mark); err != nil {
		return nil, err
	}
	for _, row := range p.FromFuture() { // a decision on them brings them back to the present
		s.owner.ClockRepaired(ctx, row.Name)
	}
	p.SetNow(asks)
	p.Settle(asks)
	return p, nil
}

// takeLocked decides on a call by locking all of its rows, in the transaction of s. A refusal undoes that, unless it
// must correct a clock.
func (s *Session) takeLocked(ctx context.Context, c *Call) error {
	p, err := s.lock(ctx, true, c.Asks)
	if err != nil {
		return err
	}
	if !c.Claim() { // its caller has left
		return s.memory.Undo(ctx, &s.Unit)
	}
	c.Answers = p.Take(c.Asks, c.one[:0])
	var made []Record
	if c.Reserve != nil && bucket.AllAllowed(c.Answers) {
		c.Record = c.Reserve.Record(c.Asks, c.Answers)
		made = append(made, c.Record)
	}
	if p.HasChanged() || made != nil {
		return s.memory.Save(ctx, &s.Unit, p, made...)
	}
	return s.memory.Undo(ctx, &s.Unit)
}

// ChangeRows changes the rows of asks, once, on rows that it locks: in the transaction of the session, or else in one
// of its own.
func (s *Session) ChangeRows(ctx context.Context, asks []bucket.Ask, change func(p *bucket.Page)) error {
	return s.ensureTx(ctx, func(tx *Session) error {
		p, err := tx.lock(ctx, false, asks)
		if err != nil {
			return err
		}
		change(p)
		return tx.memory.Save(ctx, &tx.Unit, p)
	})
}
