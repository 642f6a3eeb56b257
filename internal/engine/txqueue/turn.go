package txqueue

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// turnWait has the statements by which an empty SERIALIZABLE transaction waits until it has advisory locks.
//
// The transaction that waits must have no snapshot yet, but waiting is a statement, which takes one. So another
// transaction waits in its place, at READ COMMITTED, because a waiting SERIALIZABLE transaction would hold up the
// conflict detection of all others. It keeps the locks for the session when it commits. The next transaction takes them
// over, so its end releases them, however it ends. All statements are one message, at whose end a transaction is open.
// So a pooler in transaction mode sends them to one connection of the server.
const turnWait = `ROLLBACK; BEGIN ISOLATION LEVEL READ COMMITTED;
	SELECT pg_catalog.set_config('lock_timeout', '%[2]d', true), pg_catalog.set_config('statement_timeout', '0', true);
	SELECT pg_catalog.bool_or(CASE WHEN pg_catalog.pg_try_advisory_xact_lock(k) THEN false
		ELSE pg_catalog.pg_advisory_xact_lock(k) IS NOT NULL END) FROM pg_catalog.unnest('{%[1]s}'::pg_catalog.int8[]) AS k;
	SELECT pg_catalog.pg_advisory_lock(k) FROM pg_catalog.unnest('{%[1]s}'::pg_catalog.int8[]) AS k;
	COMMIT; BEGIN ISOLATION LEVEL SERIALIZABLE;
	SELECT CASE WHEN pg_catalog.pg_advisory_xact_lock(k) IS NOT NULL THEN pg_catalog.pg_advisory_unlock(k) END
		FROM pg_catalog.unnest('{%[1]s}'::pg_catalog.int8[]) AS k`

// waitAnswer is the place of the answer that says whether it waited. Until the next one the session holds no lock.
const waitAnswer = 3

// turnForgone begins the transaction anew when the wait failed.
const turnForgone = `ROLLBACK; BEGIN ISOLATION LEVEL SERIALIZABLE`

// lockOf returns the advisory lock by which transactions of all processes take turns at a bucket. It is so long that an
// attacker who chooses keys cannot make two buckets wait for each other.
func lockOf(schema string, k bucket.Key) int64 {
	text, _ := json.Marshal([]any{"pgratelimit turn", schema, k.Name, k.Key, k.Shard}) // of strings and a number
	sum := sha256.Sum256(text)
	return int64(binary.BigEndian.Uint64(sum[:8]))
}

// turnTx is a SERIALIZABLE transaction that can wait for its turn before its first statement. The wait is part of no
// deadlock in the server: a waiting transaction holds nothing but locks of turns, which all transactions take in one
// order and at one time.
type turnTx struct {
	pgx.Tx
	used bool // whether something may have been sent in it
}

// await makes a transaction in which nothing was sent wait for locks, in their order. It reports whether the
// transaction has them, and whether others had one of them before. Without them it goes on. If its connection is lost,
// the next statement fails.
func (tx *turnTx) await(ctx context.Context, locks []int64, most time.Duration) (came, waited bool) {
	tx.used = true
	conn := tx.Tx.Conn()
	list := strings.Trim(strings.ReplaceAll(fmt.Sprint(locks), " ", ","), "[]")
	// 0 would be for ever
	results, err := conn.PgConn().Exec(ctx, fmt.Sprintf(turnWait, list, max(most.Milliseconds(), 1))).ReadAll()
	switch {
	case err == nil:
		return true, string(results[waitAnswer].Rows[0][0]) == "t"
	case len(results) > waitAnswer+1:
		_ = conn.Close(ctx) // and what the session holds goes with it
	case ctx.Err() == nil:
		if _, err = conn.PgConn().Exec(ctx, turnForgone).ReadAll(); err != nil {
			_ = conn.Close(ctx)
		}
	}
	return false, true
}

// SendBatch sends statements. Like the other methods that send something it leaves no room for a wait.
func (tx *turnTx) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	tx.used = true
	return tx.Tx.SendBatch(ctx, batch)
}

// Query runs a statement.
func (tx *turnTx) Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error) {
	tx.used = true
	return tx.Tx.Query(ctx, sql, arguments...)
}

// QueryRow runs a statement.
func (tx *turnTx) QueryRow(ctx context.Context, sql string, arguments ...any) pgx.Row {
	tx.used = true
	return tx.Tx.QueryRow(ctx, sql, arguments...)
}

// Exec runs a statement.
func (tx *turnTx) Exec(ctx context.Context, sql string, arguments ...any) (pgconn.CommandTag, error) {
	tx.used = true
	return tx.Tx.Exec(ctx, sql, arguments...)
}

// Begin begins a nested transaction.
func (tx *turnTx) Begin(ctx context.Context) (pgx.Tx, error) {
	tx.used = true
	return tx.Tx.Begin(ctx)
}

// CopyFrom copies rows.
func (tx *turnTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string,
	rows pgx.CopyFromSource,
) (int64, error) {
	tx.used = true
	return tx.Tx.CopyFrom(ctx, table, columns, rows)
}

// Prepare prepares a statement.
func (tx *turnTx) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	tx.used = true
	return tx.Tx.Prepare(ctx, name, sql)
}

// LargeObjects returns the large objects.
func (tx *turnTx) LargeObjects() pgx.LargeObjects {
	tx.used = true
	return tx.Tx.LargeObjects()
}

// Conn returns the connection, on which anything may be sent.
func (tx *turnTx) Conn() *pgx.Conn {
	tx.used = true
	return tx.Tx.Conn()
}
