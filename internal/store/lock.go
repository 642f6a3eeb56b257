package store

import (
	"context"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// lock locks and reads every row of the calls' buckets, in the transaction of s. In a transaction of its own it returns a heldError if
// another transaction holds a row. With mark, it first marks the place that an Undo goes back to.
func (s *Session) lock(ctx context.Context, mark bool, calls ...[]bucket.Ask) (*bucket.Page, error) {
	p, err := s.lockFree(ctx, mark, calls...)
	if err != nil {
		return nil, err
	}
	for _, asks := range calls {
		if row, held := p.Held(asks); held {
			return nil, &heldError{row: row}
		}
	}
	return p, nil
}

// lockFree is lock, but leaves out rows that other transactions hold, if the engine does so.
func (s *Session) lockFree(ctx context.Context, mark bool, calls ...[]bucket.Ask) (*bucket.Page, error) {
	p := bucket.NewPage(calls...)
	if err := s.lockRows(ctx, p, mark); err != nil {
		return nil, err
	}
	for _, row := range p.FromFuture() { // a decision on them brings them back to the present
		s.owner.Mended(ctx, row.Name)
	}
	p.SetNow(calls...)
	p.Settle(calls...)
	return p, nil
}

// takeLocked decides on a call by locking all of its rows, in the transaction of s. A refusal undoes that, unless it must correct a
// clock.
func (s *Session) takeLocked(ctx context.Context, c *Call) error {
	p, err := s.lock(ctx, true, c.Asks)
	if err != nil {
		return err
	}
	c.Answers = p.Take(c.Asks, c.one[:0])
	if p.HasChanged() {
		return s.save(ctx, p)
	}
	return s.Engine().Undo(ctx, &s.Unit, p)
}
