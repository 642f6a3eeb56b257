package store

import (
	"context"
	"math"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Return gives back to a bucket what is left of what was taken ahead of it, and returns how much that was. The statement
// is its own transaction, and waits for the row. Terms are those that it was taken under.
func (s *Session) Return(ctx context.Context, k bucket.Key, t bucket.Terms, a bucket.Ahead) (given float64, err error) {
	until := int64(math.MaxInt64)
	if t.Eras != nil {
		_, end := t.Span()
		until = end - 1
	}
	if s.engine != nil {
		return s.returnToEngine(ctx, k, t, a, until)
	}
	if s.routed() {
		return s.returnRouted(ctx, k, t, a, until)
	}
	err = s.retry(ctx, "return", func() error {
		rows, err := s.conn.Query(ctx, s.statements.giveBack, k.Name, k.Key, k.Shard, a.Left, a.Taken, a.TS,
			t.Capacity, t.Rate, t.Steps, until, s.now())
		if err != nil {
			return err
		}
		all, err := pgx.CollectRows(rows, pgx.RowTo[float64])
		given = 0
		if len(all) > 0 {
			given = all[0]
		}
		return err
	})
	return given, err
}
