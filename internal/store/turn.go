package store

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
)

// The statements that have a transaction wait for its turn, which go before its first one in the same write.
//
// A SERIALIZABLE transaction that waits must have no snapshot yet, and to wait is a statement, which takes one. So it is
// another transaction that waits, in place of the empty one that was begun: at READ COMMITTED, as one that is SERIALIZABLE would
// hold up the conflict detection of all others. It takes the lock for the session and commits. The next one makes it the
// transaction's own, so that what gives it up is the end of the transaction, whichever that is, in the server: nobody
// unlocks, and nothing is left behind in a connection. All of it is one message, at the end of which a transaction is
// open, so that a pooler in transaction mode hands it to one connection of the server as well.
const (
	turnEmpty = `ROLLBACK`
	turnFirst = `BEGIN ISOLATION LEVEL READ COMMITTED`
	turnWait  = `SELECT CASE WHEN pg_catalog.pg_try_advisory_lock($1) THEN false
		WHEN pg_catalog.set_config('lock_timeout', $2, true) IS NULL THEN NULL
		ELSE pg_catalog.pg_advisory_lock($1) IS NOT NULL END`
	turnCame  = `COMMIT`
	turnBegin = `BEGIN ISOLATION LEVEL SERIALIZABLE`
	turnOwn   = `SELECT CASE WHEN pg_catalog.pg_advisory_xact_lock($1) IS NOT NULL THEN pg_catalog.pg_advisory_unlock($1) END`
	// turnForgone begins the transaction anew when the wait failed. A timeout that comes together with the lock leaves the
	// session with it, so that is looked up; it is one message without parameters, as what comes before is aborted.
	turnForgone = `ROLLBACK; BEGIN ISOLATION LEVEL READ COMMITTED;
		SELECT pg_catalog.pg_advisory_unlock(%[1]d) FROM pg_catalog.pg_locks
		WHERE locktype = 'advisory' AND pid = pg_catalog.pg_backend_pid() AND objsubid = 1 AND granted
			AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
			AND (classid::bigint << 32) | objid::bigint = %[1]d;
		COMMIT; BEGIN ISOLATION LEVEL SERIALIZABLE`
)

// Turn is what a transaction waits for before its first statement: that no other holds its lock.
type Turn struct {
	Lock int64 // of TurnLock
	Wait time.Duration
	// Over is called when the wait is over, with whether the transaction's turn came, and whether others had it until then.
	Over func(came, waited bool)
}

// TurnLock returns the advisory lock by which transactions of all processes take turns at a bucket. It is as long as
// hashes of chosen keys have to be that nobody makes two buckets wait for each other.
func (s *Store) TurnLock(k bucket.Key) int64 {
	text, _ := json.Marshal([]any{"pgratelimit turn", s.schema, k.Name, k.Key, k.Shard}) // of strings and a number
	sum := sha256.Sum256(text)
	return int64(binary.BigEndian.Uint64(sum[:8]))
}

// TurnTx is a SERIALIZABLE transaction that can wait for its turn before its first statement. The wait can be part of no
// deadlock in the server: whoever waits holds nothing there.
type TurnTx struct {
	pgx.Tx
	used bool  // whether a statement has been sent in it
	turn *Turn // that goes before the next statement; nil: none
}

// IsFresh reports whether no statement has been sent in the transaction, so that it can still wait.
func (tx *TurnTx) IsFresh() bool { return !tx.used }

// AwaitWithNext has a fresh transaction wait for its turn in the round trip of the statement that comes next.
func (tx *TurnTx) AwaitWithNext(turn Turn) { tx.turn = &turn }

// Await has a fresh transaction wait for its turn now. An error is that of a statement.
func (tx *TurnTx) Await(ctx context.Context, turn Turn) error {
	tx.used = true
	results, _, err := tx.send(ctx, &turn, &pgx.Batch{})
	if results == nil {
		return err
	}
	return results.Close()
}

// use notes that a statement is sent, and returns the turn that goes before it.
func (tx *TurnTx) use() *Turn {
	turn := tx.turn
	tx.used, tx.turn = true, nil
	return turn
}

// send sends batch behind the statements that wait for the turn, and returns the results of batch. came says whether the
// turn came; where it did not, and there is no error, nothing of batch was run, and the transaction goes on without.
func (tx *TurnTx) send(ctx context.Context, turn *Turn, batch *pgx.Batch) (results pgx.BatchResults, came bool, err error) {
	all := &pgx.Batch{}
	all.Queue(turnEmpty)
	all.Queue(turnFirst)
	all.Queue(turnWait, turn.Lock, strconv.FormatInt(max(turn.Wait.Milliseconds(), 1), 10)) // 0 would be for ever
	all.Queue(turnCame)
	all.Queue(turnBegin)
	all.Queue(turnOwn, turn.Lock)
	for _, q := range batch.QueuedQueries { // which may have to be sent by themselves, as they are
		all.QueuedQueries = append(all.QueuedQueries, &pgx.QueuedQuery{SQL: q.SQL, Arguments: q.Arguments, Fn: q.Fn})
	}
	results = tx.Tx.SendBatch(ctx, all)
	waited, err := receiveTurn(results)
	turn.Over(err == nil, waited)
	if err == nil {
		return results, true, nil
	}
	_ = results.Close() // with the same error
	if conn := tx.Tx.Conn(); !conn.IsClosed() {
		if _, undoErr := tx.Tx.Exec(ctx, fmt.Sprintf(turnForgone, turn.Lock)); undoErr != nil {
			_ = conn.Close(ctx) // and what the session holds goes with it
			return nil, false, fmt.Errorf("begin again without a turn: %w", undoErr)
		}
		if hasTimedOut(err) {
			return nil, false, nil
		}
	}
	return nil, false, fmt.Errorf("wait for a turn: %w", err)
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

// Query runs a statement, with the wait before it where there is one.
func (tx *TurnTx) Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error) {
	turn := tx.use()
	if turn == nil {
		return tx.Tx.Query(ctx, sql, arguments...)
	}
	batch := &pgx.Batch{}
	batch.Queue(sql, arguments...)
	results, came, err := tx.send(ctx, turn, batch)
	switch {
	case err != nil:
		return nil, err
	case !came:
		return tx.Tx.Query(ctx, sql, arguments...)
	}
	rows, err := results.Query()
	if err != nil {
		_ = results.Close() // with the same error
		return nil, err
	}
	return &lastRows{Rows: rows, results: results}, nil
}

// SendBatch sends statements, with the wait before them where there is one.
func (tx *TurnTx) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	turn := tx.use()
	if turn == nil {
		return tx.Tx.SendBatch(ctx, batch)
	}
	results, came, err := tx.send(ctx, turn, batch)
	switch {
	case err != nil:
		return pgx.FailedBatchResults(batch, err)
	case !came:
		return tx.Tx.SendBatch(ctx, batch)
	}
	return results
}

// Exec runs a statement, with the wait before it where there is one.
func (tx *TurnTx) Exec(ctx context.Context, sql string, arguments ...any) (tag pgconn.CommandTag, err error) {
	turn := tx.use()
	if turn == nil {
		return tx.Tx.Exec(ctx, sql, arguments...)
	}
	batch := &pgx.Batch{}
	batch.Queue(sql, arguments...)
	results, came, err := tx.send(ctx, turn, batch)
	switch {
	case err != nil:
		return tag, err
	case !came:
		return tx.Tx.Exec(ctx, sql, arguments...)
	}
	tag, err = results.Exec()
	if closeErr := results.Close(); err == nil {
		err = closeErr
	}
	return tag, err
}

// Begin begins a nested transaction, and like the other methods that send something leaves no room for a wait.
func (tx *TurnTx) Begin(ctx context.Context) (pgx.Tx, error) {
	tx.use()
	return tx.Tx.Begin(ctx)
}

// QueryRow runs a statement.
func (tx *TurnTx) QueryRow(ctx context.Context, sql string, arguments ...any) pgx.Row {
	tx.use()
	return tx.Tx.QueryRow(ctx, sql, arguments...)
}

// CopyFrom copies rows.
func (tx *TurnTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, rows pgx.CopyFromSource) (int64, error) {
	tx.use()
	return tx.Tx.CopyFrom(ctx, table, columns, rows)
}

// Prepare prepares a statement.
func (tx *TurnTx) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	tx.use()
	return tx.Tx.Prepare(ctx, name, sql)
}

// LargeObjects returns the large objects.
func (tx *TurnTx) LargeObjects() pgx.LargeObjects {
	tx.use()
	return tx.Tx.LargeObjects()
}

// Conn returns the connection, on which anything may be sent.
func (tx *TurnTx) Conn() *pgx.Conn {
	tx.use()
	return tx.Tx.Conn()
}

// lastRows are the rows of the last statement of a batch, which end it.
type lastRows struct {
	pgx.Rows
	results pgx.BatchResults
	err     error
}

// Next reads the next row.
func (r *lastRows) Next() bool {
	if r.Rows.Next() {
		return true
	}
	r.Close()
	return false
}

// Close ends the batch.
func (r *lastRows) Close() {
	r.Rows.Close()
	if err := r.results.Close(); r.err == nil {
		r.err = err
	}
}

// Err returns what went wrong.
func (r *lastRows) Err() error {
	if err := r.Rows.Err(); err != nil {
		return err
	}
	return r.err
}
