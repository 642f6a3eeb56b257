package turns

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// The statements by which a transaction waits for its turn. They precede its first statement in the same write.
//
// A SERIALIZABLE transaction that waits must have no snapshot yet, but waiting is a statement, which takes a snapshot. So another
// transaction waits, in place of the empty transaction that was begun. It runs at READ COMMITTED, because a waiting SERIALIZABLE
// transaction would hold up the conflict detection of all others. It takes the lock for the session and commits. The next
// transaction takes over the lock, so that its end in the server releases it. No statement unlocks, and no lock stays in a
// connection. All statements are one message, and a transaction is open at its end. So also a pooler in transaction mode sends them
// to one connection of the server.
const (
	turnEmpty = `ROLLBACK`
	turnFirst = `BEGIN ISOLATION LEVEL READ COMMITTED`
	turnWait  = `SELECT CASE WHEN pg_catalog.pg_try_advisory_lock($1) THEN false
		WHEN pg_catalog.set_config('lock_timeout', $2, true) IS NULL THEN NULL
		ELSE pg_catalog.pg_advisory_lock($1) IS NOT NULL END`
	turnCame  = `COMMIT`
	turnBegin = `BEGIN ISOLATION LEVEL SERIALIZABLE`
	turnOwn   = `SELECT CASE WHEN pg_catalog.pg_advisory_xact_lock($1) IS NOT NULL THEN pg_catalog.pg_advisory_unlock($1) END`
	// turnForgone begins the transaction anew when the wait failed. If the timeout and the lock arrive together, the session holds the
	// lock, so this checks for it. It is one message without parameters, because the transaction before is aborted.
	turnForgone = `ROLLBACK; BEGIN ISOLATION LEVEL READ COMMITTED;
		SELECT pg_catalog.pg_advisory_unlock(%[1]d) FROM pg_catalog.pg_locks
		WHERE locktype = 'advisory' AND pid = pg_catalog.pg_backend_pid() AND objsubid = 1 AND granted
			AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
			AND (classid::bigint << 32) | objid::bigint = %[1]d;
		COMMIT; BEGIN ISOLATION LEVEL SERIALIZABLE`
)

// turn is what a transaction waits for before its first statement: that no other holds its lock.
type turn struct {
	lock int64 // of lockOf
	wait time.Duration
	// over is called when the wait is over, with whether the transaction's turn came, and whether others had it until then.
	over func(came, waited bool)
}

// lockOf returns the advisory lock by which transactions of all processes take turns at a bucket. It is so long that an attacker who
// chooses keys cannot make two buckets wait for each other.
func lockOf(schema string, k bucket.Key) int64 {
	text, _ := json.Marshal([]any{"pgratelimit turn", schema, k.Name, k.Key, k.Shard}) // of strings and a number
	sum := sha256.Sum256(text)
	return int64(binary.BigEndian.Uint64(sum[:8]))
}

// turnTx is a SERIALIZABLE transaction that can wait for its turn before its first statement. The wait can be part of no
// deadlock in the server: a waiting transaction holds nothing there.
type turnTx struct {
	pgx.Tx
	used bool  // whether a statement has been sent in it
	next *turn // that goes before the next statement; nil: none
}

// await makes a transaction that has sent nothing wait for its turn now. It returns the error of the statement.
func (tx *turnTx) await(ctx context.Context, next *turn) error {
	tx.used = true
	results, err := tx.send(ctx, next, &pgx.Batch{})
	if results == nil {
		return err
	}
	return results.Close()
}

// send sends batch behind the statements that wait for the turn, and returns the results of batch. They are nil if the turn did not come.
// If there is no error then, the transaction goes on without, and nothing of batch was run.
func (tx *turnTx) send(ctx context.Context, next *turn, batch *pgx.Batch) (pgx.BatchResults, error) {
	all := &pgx.Batch{}
	all.Queue(turnEmpty)
	all.Queue(turnFirst)
	all.Queue(turnWait, next.lock, strconv.FormatInt(max(next.wait.Milliseconds(), 1), 10)) // 0 would be for ever
	all.Queue(turnCame)
	all.Queue(turnBegin)
	all.Queue(turnOwn, next.lock)
	for _, q := range batch.QueuedQueries { // which may have to be sent alone and unchanged
		all.QueuedQueries = append(all.QueuedQueries, &pgx.QueuedQuery{SQL: q.SQL, Arguments: q.Arguments, Fn: q.Fn})
	}
	results := tx.Tx.SendBatch(ctx, all)
	waited, err := receiveTurn(results)
	next.over(err == nil, waited)
	if err == nil {
		return results, nil
	}
	_ = results.Close() // with the same error
	if conn := tx.Tx.Conn(); !conn.IsClosed() {
		if _, undoErr := tx.Tx.Exec(ctx, fmt.Sprintf(turnForgone, next.lock)); undoErr != nil {
			_ = conn.Close(ctx) // and what the session holds goes with it
			return nil, fmt.Errorf("begin again without a turn: %w", undoErr)
		}
		if store.HasTimedOut(err) {
			return nil, nil //nolint:nilnil // it goes on without
		}
	}
	return nil, fmt.Errorf("wait for a turn: %w", err)
}

// receiveTurn reads the results of the statements that wait.
func receiveTurn(results pgx.BatchResults) (waited bool, err error) {
	for range 2 {
		if _, err = results.Exec(); err != nil {
			return false, err
		}
	}
	if err = results.QueryRow().Scan(&waited); err != nil {
		return false, err
	}
	for range 3 {
		if _, err = results.Exec(); err != nil {
			return waited, err
		}
	}
	return waited, nil
}

// SendBatch sends statements, with the wait before them, if any.
func (tx *turnTx) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	next := tx.next
	tx.use()
	if next == nil {
		return tx.Tx.SendBatch(ctx, batch)
	}
	results, err := tx.send(ctx, next, batch)
	switch {
	case err != nil:
		return pgx.FailedBatchResults(batch, err)
	case results == nil:
		return tx.Tx.SendBatch(ctx, batch)
	}
	return results
}

// Query runs a statement, with the wait before it, if any.
func (tx *turnTx) Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error) {
	if tx.next == nil {
		tx.use()
		return tx.Tx.Query(ctx, sql, arguments...)
	}
	batch := &pgx.Batch{}
	batch.Queue(sql, arguments...)
	return store.QueryLast(tx.SendBatch(ctx, batch))
}

// Exec runs a statement, with the wait before it, if any.
func (tx *turnTx) Exec(ctx context.Context, sql string, arguments ...any) (tag pgconn.CommandTag, err error) {
	if tx.next == nil {
		tx.use()
		return tx.Tx.Exec(ctx, sql, arguments...)
	}
	batch := &pgx.Batch{}
	batch.Queue(sql, arguments...)
	results := tx.SendBatch(ctx, batch)
	tag, err = results.Exec()
	if closeErr := results.Close(); err == nil {
		err = closeErr
	}
	return tag, err
}

// use notes that something is sent.
func (tx *turnTx) use() { tx.used, tx.next = true, nil }

// Begin begins a nested transaction, and like the other methods that send something leaves no room for a wait.
func (tx *turnTx) Begin(ctx context.Context) (pgx.Tx, error) {
	tx.use()
	return tx.Tx.Begin(ctx)
}

// QueryRow runs a statement.
func (tx *turnTx) QueryRow(ctx context.Context, sql string, arguments ...any) pgx.Row {
	tx.use()
	return tx.Tx.QueryRow(ctx, sql, arguments...)
}

// CopyFrom copies rows.
func (tx *turnTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, rows pgx.CopyFromSource) (int64, error) {
	tx.use()
	return tx.Tx.CopyFrom(ctx, table, columns, rows)
}

// Prepare prepares a statement.
func (tx *turnTx) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	tx.use()
	return tx.Tx.Prepare(ctx, name, sql)
}

// LargeObjects returns the large objects.
func (tx *turnTx) LargeObjects() pgx.LargeObjects {
	tx.use()
	return tx.Tx.LargeObjects()
}

// Conn returns the connection, on which anything may be sent.
func (tx *turnTx) Conn() *pgx.Conn {
	tx.use()
	return tx.Tx.Conn()
}
