package contender

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
)

// Naive is the limiter of a document database ported as it stands: a SERIALIZABLE transaction that reads the
// row, computes in Go, writes the row, and is run again when it conflicts.
type Naive struct {
	Keys int
	Body Body
}

// Open makes the rows.
func (w Naive) Open(ctx context.Context, b Bench) (Runner, error) {
	if err := w.Body.prepare(ctx, b.Database); err != nil {
		return nil, err
	}
	all, policy := makeKeys(w.Keys), policyFor(w.Keys)
	perMicrosecond := policy.Rate / float64(policy.Period.Microseconds())
	return openTransactions(ctx, b, w.Keys, pgx.Serializable, func(ctx context.Context, tx pgx.Tx, c *load.Caller) error {
		key, value, ts := all.any(c), 0.0, int64(0)
		const read = `SELECT value, ts FROM ratelimit.buckets WHERE name = $1 AND key = $2 AND shard = 0`
		if err := tx.QueryRow(ctx, read, b.Name, key).Scan(&value, &ts); err != nil {
			return err
		}
		now := max(time.Now().UnixMicro(), ts)
		value = min(policy.Capacity, value+float64(now-ts)*perMicrosecond) - 1
		if value < 0 {
			return errors.New("the naive port refused a call that it has enough for")
		}
		const write = `UPDATE ratelimit.buckets SET value = $3, ts = $4 WHERE name = $1 AND key = $2 AND shard = 0`
		if _, err := tx.Exec(ctx, write, b.Name, key, value, now); err != nil {
			return err
		}
		return w.Body.run(ctx, tx, c)
	})
}
