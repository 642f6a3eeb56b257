package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
)

// A transaction of the Limiter's own never waits for a row while it holds another: whoever has that row may have
// it for long, and may want those that are held. It locks the rows that are free. When it needs one that is not,
// it ends, and is made again with the wait for that row as its first statement.

// heldError says that somebody holds a row which a call needs. Nothing was done; the call is made again when that
// row was waited for.
type heldError struct{ row which }

func (e *heldError) Error() string {
	return fmt.Sprintf("a transaction holds the row of a bucket of %q", e.row.name)
}

// afterWaitFor returns a Limiter whose transactions begin with the wait for a row.
func (l *Limiter) afterWaitFor(row which) *Limiter {
	waiting := *l
	waiting.waitFor = &row
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
			return fmt.Errorf("ratelimit: gave up after %d attempts: %w (last: %w)", n, ctx.Err(), err)
		case n >= l.config.MaxAttempts:
			return fmt.Errorf("%w: gave up after %d attempts: %w", ErrContended, n, err)
		}
		l = l.afterWaitFor(held.row)
	}
}

// queueWait queues the wait for the row that the Limiter is to wait for, when it is one of rows. It is the first
// statement of its transaction. It locks the row, and makes it when it is not there.
func (l *Limiter) queueWait(batch *pgx.Batch, rows []bucket) {
	if l.waitFor == nil {
		return
	}
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

// blameMaker returns a heldError in place of the lock timeout of a statement that locks or makes rows: somebody was
// making one of them in a transaction that had not ended, and the statement waited for that. It is one of those that
// are not there, or any when they all are by now.
func (l *Limiter) blameMaker(ctx context.Context, err error) error {
	var timedOut *makeError
	if !errors.As(err, &timedOut) || sqlstate(err) != codeLockNotAvailable {
		return err
	}
	missing, readErr := l.missing(ctx, timedOut.rows)
	if readErr != nil {
		return errors.Join(err, readErr)
	}
	for i := range timedOut.rows {
		row := timedOut.rows[i].which()
		if (len(missing) == 0 || slices.Contains(missing, row)) && (l.waitFor == nil || *l.waitFor != row) {
			return &heldError{row: row}
		}
	}
	return err
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
