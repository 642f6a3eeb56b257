package ratelimit

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// A transaction of the Limiter's own does not wait for a row while it holds others: whoever has that row may have it
// for long, and may want those that are held. It locks the rows that are free. When it needs one that is not, it
// ends, and is made again with the wait for that row as its first statement.

// heldError says that somebody holds a row which a call needs: nil when it is not known which. Nothing was done; the
// call is made again when that row was waited for.
type heldError struct{ row *which }

func (e *heldError) Error() string { return "another transaction holds the row of a bucket" }

// afterWaitFor returns a Limiter whose transactions begin with the wait for a row, unless that is nil.
func (l *Limiter) afterWaitFor(row *which) *Limiter {
	if l.waitFor == row {
		return l
	}
	waiting := *l
	waiting.waitFor = row
	return &waiting
}

// retryHeld runs fn until it needs no row that somebody holds, or the attempts are used up. Bound to a transaction it
// runs fn once: whoever began that one retries.
func (l *Limiter) retryHeld(ctx context.Context, fn func(l *Limiter) error) error {
	if l.pool == nil {
		return fn(l)
	}
	for n := 1; ; n++ {
		err := l.blameMaker(ctx, fn(l))
		var held *heldError
		switch {
		case !errors.As(err, &held):
			return err
		case ctx.Err() != nil:
			return prefixed(fmt.Errorf("gave up after %d attempts: %w (last: %w)", n, ctx.Err(), err))
		case n >= l.config.MaxAttempts:
			return prefixed(fmt.Errorf("%w: gave up after %d attempts: %w", ErrContended, n, err))
		}
		l = l.afterWaitFor(held.row)
	}
}

// queueWait queues the wait for the row that the Limiter is to wait for, when it is one of rows. It is the first
// statement of its transaction, but for a savepoint. It locks the row, and makes it when it is not there.
func (l *Limiter) queueWait(batch *pgx.Batch, rows []bucket) {
	for i := range rows {
		if rows[i].which() == *l.waitFor {
			l.queueHold(batch, l.statements.hold, rows[i:i+1])
			return
		}
	}
}

// queueHold queues a statement that locks rows: buckets_hold.sql, which waits for them, or buckets_lock.sql.
func (l *Limiter) queueHold(batch *pgx.Batch, statement string, rows []bucket) {
	c := (&plan{buckets: rows}).columns()
	batch.Queue(statement, c.names, c.keys, c.shards, c.capacities, c.steps, c.phases, l.asOf())
}

// blameMaker returns a heldError in place of the lock timeout of a statement that locks or makes rows and waits only so
// long. When a row is not there, it was being made by a transaction that had not ended, and that is the one.
func (l *Limiter) blameMaker(ctx context.Context, err error) error {
	var timedOut *makeError
	if !errors.As(err, &timedOut) || sqlstate(err) != codeLockNotAvailable {
		return err
	}
	missing, readErr := l.missing(ctx, timedOut.rows)
	switch {
	case readErr != nil:
		return errors.Join(err, readErr)
	case len(missing) > 0:
		return &heldError{&missing[0]}
	case l.waitFor != nil:
		return &heldError{}
	}
	row := timedOut.rows[0].which() // all are there by now
	return &heldError{&row}
}

// makeError is the failure of a statement that makes those of rows that are not there.
type makeError struct {
	error
	rows []bucket
}

func (e *makeError) Unwrap() error { return e.error }

// missing returns the rows that are not there.
func (l *Limiter) missing(ctx context.Context, rows []bucket) (missing []which, err error) {
	c := (&plan{buckets: rows}).columns()
	found, err := l.db.Query(ctx, l.statements.read, c.names, c.keys, c.shards, l.asOf())
	if err != nil {
		return nil, err
	}
	i := 0
	var ts *int64
	_, err = pgx.ForEachRow(found, []any{nil, &ts, nil}, func() error {
		if ts == nil && i < len(rows) {
			missing = append(missing, rows[i].which())
		}
		i++
		return nil
	})
	return missing, err
}
