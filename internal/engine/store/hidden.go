package store

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/pgerr"
)

// QueueFiltered queues the question whether row level security applies to the role, for the buckets and the
// reservations. A read of filtered rows succeeds, so reads ask it in the same message.
func (u *Unit) QueueFiltered(batch *pgx.Batch) {
	batch.Queue(`SELECT row_security_active($1::text) OR row_security_active($2::text)`, u.Table(),
		pgx.Identifier{u.schema, "reservations"}.Sanitize())
}

// ReceiveFiltered reads the answer to QueueFiltered.
func ReceiveFiltered(results pgx.BatchResults) (filtered bool, err error) {
	err = results.QueryRow().Scan(&filtered)
	return filtered, err
}

// CheckHidden returns an error if row level security may hide rows from the role. It is another statement, so it is
// called if row level security applies at all.
func (u *Unit) CheckHidden(ctx context.Context) error {
	rows, err := u.conn.Query(ctx, "SELECT "+pgerr.Hidden("$1::text", "current_user", "buckets", "leases", "reservations"),
		pgx.QueryExecModeExec, u.schema)
	if err != nil {
		return err
	}
	hidden, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	return pgerr.HiddenError(u.schema, hidden)
}
