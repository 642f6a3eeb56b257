package contender

import (
	"context"
	"fmt"
	"sync/atomic"

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
	// Sessions gives each caller a session of its own.
	Sessions bool
}

// Open creates the rows.
func (w Raw) Open(ctx context.Context, b Bench) (*Runner, error) {
	return open(b, func(r *Runner) error {
		pool, err := r.pool(ctx, b.sessions(w.Sessions), func(config *pgxpool.Config) {
			if w.Relaxed {
				config.ConnConfig.RuntimeParams["synchronous_commit"] = "off"
			}
		})
		if err != nil {
			return err
		}
		of := newBuckets(b, b.Name, w.Keys)
		r.call = func(ctx context.Context, c *load.Caller) error { return updateRow(ctx, pool, b.Name, of.keys.any(c)) }
		return of.fillUp(ctx)
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

// RawTx is Raw in a transaction. It retries a conflict immediately.
type RawTx struct {
	Keys  int
	Level pgx.TxIsoLevel
	Body  Body
}

// Open creates the rows.
func (w RawTx) Open(ctx context.Context, b Bench) (*Runner, error) {
	return open(b, func(r *Runner) error {
		if err := w.Body.prepare(ctx, b.Database.Admin()); err != nil {
			return err
		}
		pool, err := r.pool(ctx, b.Callers)
		if err != nil {
			return err
		}
		of := newBuckets(b, b.Name, w.Keys)
		var attempts atomic.Int64
		r.attempts = attempts.Load
		r.call = func(ctx context.Context, c *load.Caller) error {
			for {
				attempts.Add(1)
				err := pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: w.Level}, func(tx pgx.Tx) error {
					return w.Body.run(ctx, tx, c, func() error { return updateRow(ctx, tx, b.Name, of.keys.any(c)) })
				})
				if err == nil || !ratelimit.IsRetryable(err) {
					return err
				}
			}
		}
		return of.fillUp(ctx)
	})
}
