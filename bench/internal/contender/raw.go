package contender

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
)

// rawUpdate is the least that a limit in a table can do, on the same rows: it neither refills nor refuses.
const rawUpdate = `UPDATE ratelimit.buckets SET value = value - 1 WHERE name = $1 AND key = $2 AND shard = 0`

// Raw is the bare update of a row by its primary key, through pgx.
type Raw struct {
	Keys int
}

// Open makes the rows.
func (w Raw) Open(ctx context.Context, b Bench) (Runner, error) {
	if err := fill(ctx, b.Database, b.Name, w.Keys, policyFor(w.Keys).Capacity); err != nil {
		return nil, err
	}
	wire := &load.Wire{}
	pool, err := b.Database.Pool(ctx, connections(b.Callers, poolConnections), wire)
	if err != nil {
		return nil, err
	}
	all := makeKeys(w.Keys)
	r := newRunner(b, func(ctx context.Context, c *load.Caller) error { return updateRow(ctx, pool, b.Name, all.any(c)) })
	r.wire = wire
	r.close = func() error { return closePool(pool) }
	return r, nil
}

// updateRow runs rawUpdate and expects the row to be there.
func updateRow(ctx context.Context, db interface {
	Exec(ctx context.Context, sql string, arguments ...any) (pgconn.CommandTag, error)
}, name, key string,
) error {
	tag, err := db.Exec(ctx, rawUpdate, name, key)
	if err == nil && tag.RowsAffected() != 1 {
		return fmt.Errorf("update %s %s: %w", name, key, pgx.ErrNoRows)
	}
	return err
}
