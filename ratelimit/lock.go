package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// A transaction of the Limiter's own does not wait for the row of a bucket while it holds others: whoever has that row may
// have it for long, and may want those that are held. It locks the rows that are free. When it needs one that is not, it
// ends, and is made again with the wait for that row before it locks others. Only the row of a reservation is locked
// before that of its bucket.

const (
	// shortWait is how long a statement that may hold rows waits for another, as lock_timeout has it: as long as a
	// transaction that is about to commit takes.
	shortWait = "2ms"
	// manyWaits is after how many rows that a call has waited for it waits for the others too, while it holds some: they
	// are all in use, and never free at the same time. It waits for each for up to leastLongWait, twice that the next
	// time, and so on up to mostLongWait.
	manyWaits     = 3
	leastLongWait = 20 * time.Millisecond
	mostLongWait  = time.Second

	// maxWaits bounds the rows that a call waits for, which the time for a call bounds first.
	maxWaits = 10_000
)

// longWait returns how long a call that has waited for so many rows waits for each, as lock_timeout has it.
func longWait(waits int) string {
	wait := leastLongWait << min(waits-manyWaits, 10)
	return fmt.Sprint(min(wait, mostLongWait).Milliseconds())
}

// heldError says that somebody holds a row which a call needs. Nothing was done; the call is made again when that row
// was waited for.
type heldError struct{ row bucket.Key }

func (e *heldError) Error() string { return "another transaction holds the row of a bucket" }

// afterWaitFor returns a Limiter whose transactions begin with the wait for a row, unless that is nil: for a call that
// has waited for so many with it.
func (l *Limiter) afterWaitFor(row *bucket.Key, waits int) *Limiter {
	if l.waitFor == row {
		return l
	}
	waiting := *l
	waiting.waitFor, waiting.waits = row, waits
	return &waiting
}

// retryHeld runs fn until it needs no row that somebody holds, or ctx ends. Bound to a transaction it runs fn once:
// whoever began that one retries.
func (l *Limiter) retryHeld(ctx context.Context, fn func(l *Limiter) error) error {
	if l.pool == nil {
		return fn(l)
	}
	for n := 1; ; n++ {
		err := l.blame(ctx, fn(l))
		var held *heldError
		switch {
		case !errors.As(err, &held):
			if l.waitFor != nil && sqlstate(err) == codeLockNotAvailable {
				err = &waitError{err, *l.waitFor}
			}
			return err
		case ctx.Err() != nil:
			return prefixed(fmt.Errorf("gave up after %d attempts: %w (last: %w)", n, ctx.Err(), err))
		case n >= maxWaits:
			return prefixed(fmt.Errorf("%w: gave up after %d waits for rows: %w", ErrContended, n, err))
		}
		l = l.afterWaitFor(&held.row, n)
	}
}

// waitError is an error of a call that had to wait for a row.
type waitError struct {
	error
	row bucket.Key
}

func (e *waitError) Unwrap() error { return e.error }

// queueWait queues the wait for the row that the Limiter is to wait for, when it is one of rows. It is the first
// statement that locks a bucket's row. It makes the row when it is not there.
func (l *Limiter) queueWait(batch *pgx.Batch, rows []ask) {
	for i := range rows {
		if l.waitFor != nil && rows[i].rowKey() == *l.waitFor {
			l.queueHold(batch, l.statements.hold, rows[i:i+1])
			return
		}
	}
}

// queueHold queues a statement that locks rows: buckets_hold.sql, which waits for them, or buckets_lock.sql.
func (l *Limiter) queueHold(batch *pgx.Batch, statement string, rows []ask) {
	c := (&plan{buckets: rows}).columns()
	batch.Queue(statement, c.names, c.keys, c.shards, c.capacities, c.steps, c.phases, l.asOf())
}

// boundError is the failure of a statement that waits for rows only so long, because it holds others meanwhile.
type boundError struct {
	error
	rows []ask // that it locks, or makes
}

func (e *boundError) Unwrap() error { return e.error }

// isBound reports whether a statement that waits for rows only so long has done so.
func isBound(err error) bool {
	var timedOut *boundError
	return errors.As(err, &timedOut) && sqlstate(err) == codeLockNotAvailable
}

// blame returns a heldError in place of the lock timeout of a statement that waits for rows only so long. It is for a
// row that somebody holds, or that is not there and may be being made; of several for the next, in the order of
// locking, after the one that was waited for last.
func (l *Limiter) blame(ctx context.Context, err error) error {
	var timedOut *boundError
	if !isBound(err) || !errors.As(err, &timedOut) {
		return err
	}
	c := (&plan{buckets: timedOut.rows}).columns()
	rows, readErr := l.db.Query(ctx, l.statements.busy, c.names, c.keys, c.shards)
	if readErr != nil {
		return errors.Join(err, readErr)
	}
	busy, readErr := pgx.CollectRows(rows, func(row pgx.CollectableRow) (k bucket.Key, err error) {
		return k, row.Scan(&k.Name, &k.Key, &k.Shard)
	})
	switch {
	case readErr != nil:
		return errors.Join(err, readErr)
	case len(busy) == 0: // all of them are free by now
		return &heldError{timedOut.rows[0].rowKey()}
	}
	return &heldError{l.nextAfterWait(busy)}
}

// nextAfterWait returns the first of the rows, in the order of locking, that comes after the one that was waited for,
// or else the first.
func (l *Limiter) nextAfterWait(rows []bucket.Key) bucket.Key {
	slices.SortFunc(rows, bucket.Key.Compare)
	for _, k := range rows {
		if l.waitFor != nil && k.Compare(*l.waitFor) > 0 {
			return k
		}
	}
	return rows[0]
}

// change runs a statement that changes rows whatever they hold. Of several it waits for each only so long, unless it is
// in a caller's transaction; when that was not enough, it locks them first.
func (l *Limiter) change(ctx context.Context, rows []ask, statement string, arguments ...any) error {
	switch {
	case len(rows) == 1 || l.pool == nil && !l.own:
	case l.waitFor == nil:
		return l.changeQuickly(ctx, rows, statement, arguments...)
	case l.pool != nil:
		return l.inTx(ctx, func(tx *Limiter) error { return tx.change(ctx, rows, statement, arguments...) })
	default:
		if _, err := l.hold(ctx, &plan{buckets: rows}); err != nil {
			return err
		}
	}
	_, err := l.db.Exec(ctx, statement, arguments...)
	return err
}

// changeQuickly is change for when the rows are free, as they mostly are.
func (l *Limiter) changeQuickly(ctx context.Context, rows []ask, statement string, arguments ...any) error {
	batch := &pgx.Batch{}
	batch.Queue(l.statements.boundWait, shortWait)
	batch.Queue(statement, arguments...)
	return l.send(ctx, batch, func(results pgx.BatchResults) error {
		if _, err := results.Exec(); err != nil {
			return err
		}
		if _, err := results.Exec(); err != nil {
			return &boundError{err, rows}
		}
		return nil
	})
}

// changeAlone runs change, which is a call of the function of that name, until it needs no row that somebody holds and
// meets no conflict.
func (l *Limiter) changeAlone(ctx context.Context, verb string, change func(l *Limiter) error) error {
	return l.retryHeld(ctx, func(l *Limiter) error {
		return l.standalone(ctx, verb, func() error { return change(l) })
	})
}

// send sends batch, and has receive read the answers.
func (l *Limiter) send(ctx context.Context, batch *pgx.Batch, receive func(pgx.BatchResults) error) (err error) {
	results := l.db.SendBatch(ctx, batch)
	defer func() {
		if closeErr := results.Close(); err == nil {
			err = closeErr
		}
	}()
	return receive(results)
}
