package contender

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Raw updates a row by its primary key, through pgx. It neither refills nor refuses.
type Raw struct {
	Keys    int
	Relaxed bool // synchronous_commit is off
}

// Open creates the rows.
func (w Raw) Open(ctx context.Context, b Bench) (Runner, error) {
	return open(b, func(r *runner) error {
		pool, err := r.pool(ctx, min(b.Callers, poolConnections), func(config *pgxpool.Config) {
			if w.Relaxed {
				config.ConnConfig.RuntimeParams["synchronous_commit"] = "off"
			}
		})
		if err != nil {
			return err
		}
		all := makeKeys(w.Keys)
		r.call = func(ctx context.Context, c *load.Caller) error { return updateRow(ctx, pool, b.Name, all.any(c)) }
		return fill(ctx, b, b.Name, w.Keys, policyFor(w.Keys).Capacity, policyFor(w.Keys).Capacity)
	})
}

// updateRow takes a token from an existing row.
func updateRow(ctx context.Context, db interface {
	Exec(ctx context.Context, sql string, arguments ...any) (pgconn.CommandTag, error)
}, name, key string,
) error {
	tag, err := db.Exec(ctx, `UPDATE ratelimit.buckets SET value = value - 1 WHERE name = $1 AND key = $2 AND shard = 0`,
		name, key)
	if err == nil && tag.RowsAffected() != 1 {
		return fmt.Errorf("update %s %s: %w", name, key, pgx.ErrNoRows)
	}
	return err
}

// Transaction runs a transaction without the Limiter. It retries a conflict immediately.
type Transaction struct {
	Keys  int
	Level pgx.TxIsoLevel
	Body  Body
	// Take takes a token of the key. A nil Take takes none.
	Take func(ctx context.Context, tx pgx.Tx, name, key string, policy ratelimit.TokenBucket) error
}

// Open creates the rows.
func (w Transaction) Open(ctx context.Context, b Bench) (Runner, error) {
	return open(b, func(r *runner) error {
		if err := w.Body.prepare(ctx, b.Database.Admin()); err != nil {
			return err
		}
		pool, err := r.pool(ctx, b.Callers)
		if err != nil {
			return err
		}
		all, policy := makeKeys(w.Keys), policyFor(w.Keys)
		var attempts atomic.Int64
		r.attempts = attempts.Load
		r.call = func(ctx context.Context, c *load.Caller) error {
			for {
				attempts.Add(1)
				err := pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: w.Level}, func(tx pgx.Tx) error {
					return w.Body.run(ctx, tx, c, func() error {
						if w.Take == nil {
							return nil
						}
						return w.Take(ctx, tx, b.Name, all.any(c), policy)
					})
				})
				if err == nil || !ratelimit.IsRetryable(err) {
					return err
				}
			}
		}
		return fill(ctx, b, b.Name, w.Keys, policy.Capacity, policy.Capacity)
	})
}

// TakeByUpdate is Raw in a Transaction.
func TakeByUpdate(ctx context.Context, tx pgx.Tx, name, key string, _ ratelimit.TokenBucket) error {
	return updateRow(ctx, tx, name, key)
}

// TakeNaively reads the row, computes in Go, and writes the row.
func TakeNaively(ctx context.Context, tx pgx.Tx, name, key string, policy ratelimit.TokenBucket) error {
	value, ts := 0.0, int64(0)
	const read = `SELECT value, ts FROM ratelimit.buckets WHERE name = $1 AND key = $2 AND shard = 0`
	if err := tx.QueryRow(ctx, read, name, key).Scan(&value, &ts); err != nil {
		return err
	}
	now := max(time.Now().UnixMicro(), ts)
	value = min(policy.Capacity, value+float64(now-ts)*policy.Rate/float64(policy.Period.Microseconds())) - 1
	if value < 0 {
		return errors.New("the naive port refused a call that it has enough for")
	}
	_, err := tx.Exec(ctx, `UPDATE ratelimit.buckets SET value = $3, ts = $4 WHERE name = $1 AND key = $2 AND shard = 0`,
		name, key, value, now)
	return err
}
