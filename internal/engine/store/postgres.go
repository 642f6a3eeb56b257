package store

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// savepoint is the place to which a call in a caller's transaction goes back, if it's refused after it has locked rows.
const savepoint = "ratelimit_take"

// postgres is the Engine on tables of Postgres.
type postgres struct{}

// Read reads rows by buckets_read.sql, or by read_rows_1.
func (postgres) Read(ctx context.Context, u *Unit, rows []bucket.Ask) ([]bucket.Answer, error) {
	statement := u.statements.read
	if u.IsRouted() {
		statement = u.statements.readRows
	}
	found, err := u.conn.Query(ctx, statement, u.rowParameters(rows)...)
	if err != nil {
		return nil, err
	}
	answers, filtered, err := scanRows(found, rows)
	if err == nil && filtered {
		err = u.CheckHidden(ctx)
	}
	return answers, err
}

// QueueSavepoint queues the statement that sets the savepoint.
func QueueSavepoint(batch *pgx.Batch) { batch.Queue("SAVEPOINT " + savepoint) }

// BackToSavepoint goes back to the savepoint, and removes it.
func (u *Unit) BackToSavepoint(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), EndTimeout) // half a call must not stay
	defer cancel()
	batch := &pgx.Batch{}
	batch.Queue("ROLLBACK TO SAVEPOINT " + savepoint)
	batch.Queue("RELEASE SAVEPOINT " + savepoint)
	if err := u.conn.SendBatch(ctx, batch).Close(); err != nil {
		return fmt.Errorf("undo: %w", err)
	}
	return nil
}

// Spoil has a statement fail.
func (postgres) Spoil(ctx context.Context, u *Unit) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), EndTimeout)
	defer cancel()
	_, _ = u.conn.Exec(ctx, "ROLLBACK TO SAVEPOINT "+savepoint+"_cancelled") // there is none
}

// QueueBound queues bound_waits_1: a statement that holds rows and waits for another keeps them from others (SQLSTATE
// 55P03 ends the wait).
func (postgres) QueueBound(batch *pgx.Batch, u *Unit, most time.Duration) {
	batch.Queue(u.statements.boundWaits, strconv.FormatInt(most.Milliseconds(), 10))
}
