package store

import (
	"context"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Return gives back to a bucket what is left of what was taken ahead of it, and returns how much that was. The statement
// is its own transaction, and waits for the row up to most, and then fails with a lock timeout; a most of 0 waits until ctx ends.
// Terms are those that it was taken under.
func (s *Session) Return(ctx context.Context, k bucket.Key, t bucket.Terms, a bucket.Ahead, most time.Duration) (given float64, err error) {
	until := int64(math.MaxInt64)
	if t.Eras != nil {
		_, end := t.Span()
		until = end - 1
	}
	if s.engine != nil || s.routed() {
		return s.returnLocked(ctx, k, t, a, until, most)
	}
	err = s.retry(ctx, "return", func() error {
		batch, bounds := &pgx.Batch{}, 0
		if most > 0 {
			bounds = s.boundWait(batch, most)
		}
		batch.Queue(s.statements.giveBack, k.Name, k.Key, k.Shard, a.Left, a.Taken, a.TS, t.Capacity, t.Rate, t.Steps, until, s.now())
		given = 0
		return s.send(ctx, batch, func(results pgx.BatchResults) error {
			if err := skip(results, bounds); err != nil {
				return err
			}
			rows, err := results.Query()
			if err != nil {
				return err
			}
			all, err := pgx.CollectRows(rows, pgx.RowTo[float64])
			if len(all) > 0 {
				given = all[0]
			}
			return err
		})
	})
	return given, err
}

// returnLocked is Return on a locked row.
func (s *Session) returnLocked(ctx context.Context, k bucket.Key, t bucket.Terms, a bucket.Ahead, until int64, most time.Duration) (given float64, err error) {
	err = s.retryTx(ctx, "return", func(tx *Session) error {
		p, batch := bucket.NewPage([]bucket.Ask{{Key: k, Terms: t.OfShard()}}), &pgx.Batch{}
		if most > 0 {
			tx.boundWait(batch, most)
		}
		if err := tx.lockRows(ctx, batch, p); err != nil {
			return err
		}
		given = p.Return(a, until)
		return tx.save(ctx, p)
	})
	return given, err
}
