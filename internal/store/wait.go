package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// A transaction of a session's own does not wait for the row of a bucket while it holds others: whoever has that row may
// have it for long, and may want those that are held. It locks the rows that are free. When it needs one that is not, it
// ends, and is made again with the wait for that row before it locks others. Only the row of a reservation is locked
// before that of its bucket.

const (
	// shortWait is how long a statement that may hold rows waits for another: as long as a transaction that is about to commit takes.
	shortWait = 2 * time.Millisecond
	// manyWaits is after how many rows that a call has waited for it waits for the others too, while it holds some: they
	// are all in use, and never free at the same time. It waits for each for up to leastLongWait, twice that the next
	// time, and so on up to mostLongWait.
	manyWaits     = 3
	leastLongWait = 20 * time.Millisecond
	mostLongWait  = time.Second

	// maxWaits bounds the rows that a call waits for, which the time for a call bounds first.
	maxWaits = 10_000
)

// waitForOthers returns how long a call waits for each row but the first.
func (s *Session) waitForOthers() time.Duration {
	if s.waits < manyWaits {
		return shortWait
	}
	return min(leastLongWait<<min(s.waits-manyWaits, 10), mostLongWait)
}

// boundWait queues what bounds how long the statements behind it, in the same transaction, wait for a row. It returns how many it queued. With
// Citus, set_config would bound the wait on one of the servers only.
func (s *Session) boundWait(batch *pgx.Batch, most time.Duration) (queued int) {
	before := batch.Len()
	switch {
	case s.engine != nil:
		s.engine.BoundWait(most)
	case s.routed():
		batch.Queue("SET LOCAL citus.propagate_set_commands TO 'local'")
		batch.Queue(fmt.Sprintf("SET LOCAL lock_timeout TO %d", most.Milliseconds()))
	default:
		batch.Queue(s.statements.boundWait, fmt.Sprint(most.Milliseconds()))
	}
	return batch.Len() - before
}

// heldError says that somebody holds a row which a call needs. Nothing was done. The call is made again, and waits for
// that row first.
type heldError struct{ row bucket.Key }

func (e *heldError) Error() string { return "another transaction holds the row of a bucket" }

// WaitError is the error of a call that had to wait for a row.
type WaitError struct {
	error
	Row bucket.Key
}

func (e *WaitError) Unwrap() error { return e.error }

// waitedFor returns err as a WaitError when the wait for row was too long for the lock_timeout of the session.
func waitedFor(err error, row bucket.Key) error {
	if SQLState(err) == codeLockNotAvailable {
		return &WaitError{err, row}
	}
	return err
}

// shortWaitError is the failure of a statement that waits for rows only so long, because it holds others meanwhile.
type shortWaitError struct {
	error
	rows   []bucket.Ask // that it locks, or makes
	waited *bucket.Key  // the one that it had waited for as long as that took; nil: what the session waited for
}

func (e *shortWaitError) Unwrap() error { return e.error }

// asShortWait returns err as a shortWaitError in a transaction of the session's own. A caller's transaction waits as long as its
// own settings say.
func (s *Session) asShortWait(err error, rows []bucket.Ask) error {
	if err != nil && s.mode == ownTx {
		return &shortWaitError{err, rows, nil}
	}
	return err
}

// waitedTooLong reports whether a statement that waits for rows only so long has done so.
func waitedTooLong(err error) bool {
	var bound *shortWaitError
	return errors.As(err, &bound) && SQLState(err) == codeLockNotAvailable
}

// waitingFor returns a session whose transactions begin with the wait for a row, unless that is nil: for a call that has
// waited for so many with it.
func (s *Session) waitingFor(row *bucket.Key, waits int) *Session {
	if s.waitFor == row {
		return s
	}
	waiting := *s
	waiting.waitFor, waiting.waits = row, waits
	return &waiting
}

// RetryHeld runs fn until it needs no row that somebody holds, or ctx ends. In a transaction it runs fn once: whoever
// began that one retries.
func (s *Session) RetryHeld(ctx context.Context, fn func(s *Session) error) error {
	if s.mode != alone {
		return fn(s)
	}
	for n := 1; ; n++ {
		err := fn(s)
		if err == nil { // as mostly, and what errors.As needs is an allocation
			return nil
		}
		err = s.findHeld(ctx, err)
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

// queueWait queues the wait for the row that the session is to wait for, when it is one of rows. It is the first
// statement that locks a bucket's row. It makes the row when it is not there. It reports whether there is one to wait for.
func (s *Session) queueWait(batch *pgx.Batch, rows []bucket.Ask) bool {
	for i := range rows {
		if s.waitFor != nil && rows[i].Key == *s.waitFor {
			s.queueLock(batch, s.statements.lock, rows[i:i+1])
			return true
		}
	}
	return false
}

// findHeld returns a heldError in place of the lock timeout of a statement that waits for rows only so long. It is for a
// row that somebody holds, or that is not there and may be being made; of several for the next, in the order of
// locking, after the one that was waited for last.
func (s *Session) findHeld(ctx context.Context, err error) error {
	var bound *shortWaitError
	if !waitedTooLong(err) || !errors.As(err, &bound) {
		return err
	}
	busy, readErr := s.busy(ctx, bound.rows)
	switch {
	case readErr != nil && !IsRetryable(readErr):
		return errors.Join(err, readErr)
	case len(busy) == 0: // all of them are free by now, or where it is not READ COMMITTED one was changed this moment
		return &heldError{bound.rows[0].Key}
	}
	return &heldError{nextAfter(cmp.Or(bound.waited, s.waitFor), busy)}
}

// busy returns those of the rows that are not free.
func (s *Session) busy(ctx context.Context, asks []bucket.Ask) ([]bucket.Key, error) {
	if s.routed() {
		return s.busyRouted(ctx, asks)
	}
	names, keys, shards := keysOf(asks)
	rows, err := s.conn.Query(ctx, s.statements.busy, names, keys, shards)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (k bucket.Key, err error) {
		return k, row.Scan(&k.Name, &k.Key, &k.Shard)
	})
}

// nextAfter returns the first of the rows, in the order of locking, that comes after the one that was waited for, or else
// the first.
func nextAfter(waited *bucket.Key, rows []bucket.Key) bucket.Key {
	slices.SortFunc(rows, bucket.Key.Compare)
	for _, k := range rows {
		if waited != nil && k.Compare(*waited) > 0 {
			return k
		}
	}
	return rows[0]
}
