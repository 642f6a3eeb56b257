package store

import (
	"context"
	"fmt"
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
	if s.engine != nil {
		return s.returnToEngine(ctx, k, t, a, until, most)
	}
	if s.routed() {
		return s.returnRouted(ctx, k, t, a, until, most)
	}
	err = s.retry(ctx, "return", func() error {
		batch, bounds := &pgx.Batch{}, 0
		if most > 0 {
			batch.Queue(s.statements.boundWait, fmt.Sprint(most.Milliseconds()))
			bounds = 1
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
