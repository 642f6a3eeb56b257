package store

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// OwnTx is a transaction of the Owner's on a connection of pgx. BEGIN travels with its first statement, and the last
// statements travel with COMMIT: lock, decide, and save are two round trips.
//
// Only Exec, Query, SendBatch, Commit and Rollback may be called before the first statement.
type OwnTx struct {
	pgx.Tx  // nil before BEGIN was sent
	conn    *pgx.Conn
	options pgx.TxOptions
	release func() // returns the connection to its pool, which closes a connection that is in a transaction
	ended   bool
	later   pgx.Batch // statements for the next message, to whose answers no caller waits
}

// NewOwnTx returns a transaction on conn, and sends nothing. Its end calls release.
func NewOwnTx(conn *pgx.Conn, options pgx.TxOptions, release func()) *OwnTx {
	return &OwnTx{conn: conn, options: options, release: release}
}

// isAlone reports whether the next statement is sent without others.
func (tx *OwnTx) isAlone() bool { return tx.Tx != nil && len(tx.later.QueuedQueries) == 0 }

// send sends BEGIN unless it was sent, the statements of sendLater, and batch, in one message. It returns the results
// of batch.
func (tx *OwnTx) send(ctx context.Context, batch *pgx.Batch) (pgx.BatchResults, error) {
	if tx.ended {
		return nil, pgx.ErrTxClosed
	}
	all, owed := &pgx.Batch{}, tx.later.Len()
	begins := tx.Tx == nil
	if begins {
		all.BeginTx(tx.options)
		owed++
	}
	all.QueuedQueries = append(append(all.QueuedQueries, tx.later.QueuedQueries...), batch.QueuedQueries...)
	tx.later = pgx.Batch{}
	results := tx.conn.SendBatch(ctx, all)
	if begins {
		tx.Tx = results.Tx()
	}
	if err := skip(results, owed); err != nil {
		_ = results.Close() // with the same error
		return nil, err
	}
	return results, nil
}

// SendBatch sends statements.
func (tx *OwnTx) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	results, err := tx.send(ctx, batch)
	if err != nil {
		return pgx.FailedBatchResults(batch, err)
	}
	return results
}

// Query runs a statement.
func (tx *OwnTx) Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error) {
	if tx.isAlone() {
		return tx.Tx.Query(ctx, sql, arguments...)
	}
	batch := &pgx.Batch{}
	batch.Queue(sql, arguments...)
	results, err := tx.send(ctx, batch)
	if err != nil {
		return nil, err
	}
	return QueryLast(results)
}

// Exec runs a statement.
func (tx *OwnTx) Exec(ctx context.Context, sql string, arguments ...any) (tag pgconn.CommandTag, err error) {
	if tx.isAlone() {
		return tx.Tx.Exec(ctx, sql, arguments...)
	}
	batch := &pgx.Batch{}
	batch.Queue(sql, arguments...)
	return tx.execLast(ctx, batch)
}

// execLast sends a batch of one statement, and reads the answer to its end.
func (tx *OwnTx) execLast(ctx context.Context, batch *pgx.Batch) (tag pgconn.CommandTag, err error) {
	results, err := tx.send(ctx, batch)
	if err != nil {
		return tag, err
	}
	tag, err = results.Exec()
	if closeErr := results.Close(); err == nil {
		err = closeErr
	}
	return tag, err
}

// Commit sends the statements of sendLater and COMMIT. An error of the server itself, and a pgx.ErrPreprocessingBatch,
// which comes before the message, say that the transaction was rolled back. If a hook panics in Commit, Rollback must
// follow.
func (tx *OwnTx) Commit(ctx context.Context) error {
	if tx.ended {
		return pgx.ErrTxClosed
	}
	if tx.Tx == nil && len(tx.later.QueuedQueries) == 0 {
		tx.end()
		return nil
	}
	batch := &pgx.Batch{}
	batch.Queue("commit")
	tag, err := tx.execLast(ctx, batch)
	if err == nil && tag.String() == "ROLLBACK" {
		err = pgx.ErrTxCommitRollback
	}
	tx.endAfter(ctx)
	return err
}

// endAfter returns the connection after COMMIT.
func (tx *OwnTx) endAfter(ctx context.Context) {
	if tx.conn.IsClosed() || tx.conn.PgConn().TxStatus() == 'I' {
		tx.end()
	} else {
		_ = tx.Rollback(ctx) // which closes the connection if it fails
	}
}

// Rollback rolls back the statements that were sent.
func (tx *OwnTx) Rollback(ctx context.Context) error {
	if tx.ended {
		return pgx.ErrTxClosed
	}
	defer tx.end()
	if tx.Tx == nil {
		return nil
	}
	return tx.Tx.Rollback(ctx)
}

// end returns the connection.
func (tx *OwnTx) end() {
	tx.ended = true
	tx.release()
}

// Conn returns the connection, which is the transaction's until its end.
func (tx *OwnTx) Conn() *pgx.Conn { return tx.conn }

// IsIdle reports whether the connection is in no transaction any more.
func (tx *OwnTx) IsIdle() bool {
	return tx.Tx != nil && !tx.conn.IsClosed() && tx.conn.PgConn().TxStatus() == 'I'
}

// QueryLast returns the rows of the last statement of a batch, which end it.
func QueryLast(results pgx.BatchResults) (pgx.Rows, error) {
	rows, err := results.Query()
	if err != nil {
		_ = results.Close() // with the same error
		return nil, err
	}
	return &lastRows{Rows: rows, results: results}, nil
}

// lastRows are rows that end a batch.
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

// relax lets an OwnTx end before its commit is on disk, if the Store says so. A lease is kept in any case. Other
// transactions stay as they are: one over several servers of Citus could lose half of its rows.
func (u *Unit) relax(ctx context.Context, rows []bucket.Ask) error {
	if _, isOwn := u.conn.(*OwnTx); !isOwn || !u.relaxed || bucket.AnyHolds(rows) {
		return nil
	}
	batch := &pgx.Batch{}
	batch.Queue(u.statements.setting, "synchronous_commit", "off")
	return u.SendLater(ctx, batch)
}
