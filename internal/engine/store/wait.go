package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/pgerr"
)

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
