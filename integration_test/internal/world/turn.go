package world

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// InTurn takes and runs fn in a transaction of InTx that has its turn among all processes at the bucket. Attempts
// without it conflict.
func InTurn(ctx context.Context, l *ratelimit.Limiter, request ratelimit.Request, fn func() error) error {
	return l.InTx(ratelimit.WithQueue(ctx, request), func(tx pgx.Tx) error {
		var has bool
		err := tx.QueryRow(ctx,
			`SELECT count(*) > 0 FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND granted`).Scan(&has)
		switch {
		case err != nil:
			return err
		case !has:
			return &pgconn.PgError{Code: "40001", Message: "has no turn yet"}
		}
		if err := l.WithTx(tx).Require(ctx, request); err != nil {
			return err
		}
		return fn()
	})
}
