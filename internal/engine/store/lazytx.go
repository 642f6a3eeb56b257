package store

import (
	"context"
	"errors"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// LazyTx is a transaction on a connection of pgx whose BEGIN travels with its first statement. A first statement that
// can't be in one message with BEGIN follows it.
type LazyTx struct {
	pgx.Tx  // nil before BEGIN was sent
	pool    *pgxpool.Pool
	pooled  *pgxpool.Conn // its pool closes a connection that is released in a transaction
	conn    *pgx.Conn     // of pooled
	options pgx.TxOptions
	ended   bool

	ctx     context.Context //nolint:containedctx // of BEGIN, where a method has none
	mode    pgx.QueryExecMode
	refused error
}

// NewLazyTx returns a transaction on a connection of pool, which runs queries in a mode by default, and sends nothing.
func NewLazyTx(ctx context.Context, pool *pgxpool.Pool, mode pgx.QueryExecMode,
	options pgx.TxOptions,
) (*LazyTx, error) {
	tx := &LazyTx{pool: pool, options: options, ctx: ctx, mode: mode}
	return tx, tx.connect(ctx)
}

// connect acquires a connection.
func (tx *LazyTx) connect(ctx context.Context) (err error) {
	if tx.pooled, err = tx.pool.Acquire(ctx); err == nil {
		tx.conn = tx.pooled.Conn()
	}
	return err
}

// Refused returns the error of BEGIN, with which the first statement has failed.
func (tx *LazyTx) Refused() error { return tx.refused }

// IsClosed reports whether the connection is closed.
func (tx *LazyTx) IsClosed() bool { return tx.conn.IsClosed() }

// IsIdle reports whether the connection is in no transaction any more.
func (tx *LazyTx) IsIdle() bool {
	return tx.Tx != nil && !tx.conn.IsClosed() && tx.conn.PgConn().TxStatus() == 'I'
}

// start sends BEGIN unless it was sent.
func (tx *LazyTx) start(ctx context.Context) error {
	switch {
	case tx.ended:
		return pgx.ErrTxClosed
	case tx.Tx != nil:
		return tx.refused
	}
	begun, err := tx.conn.BeginTx(ctx, tx.options)
	if err != nil {
		return tx.refuse(err)
	}
	tx.Tx = begun
	return nil
}

// refuse returns the error of BEGIN, and keeps it.
func (tx *LazyTx) refuse(err error) error {
	failed := &pgx.Batch{}
	failed.BeginTx(tx.options)
	tx.Tx, tx.refused = pgx.FailedBatchResults(failed, err).Tx(), err // a closed one
	return err
}

// sendFirst sends a batch with BEGIN. sent is false if BEGIN must be sent first, because the statements can't be
// prepared before it.
func (tx *LazyTx) sendFirst(ctx context.Context, batch *pgx.Batch) (results pgx.BatchResults, sent bool, err error) {
	all := &pgx.Batch{}
	all.BeginTx(tx.options)
	all.QueuedQueries = append(all.QueuedQueries, batch.QueuedQueries...)
	results = tx.conn.SendBatch(ctx, all)
	tx.Tx = results.Tx()
	if err = skip(results, 1); err == nil {
		return results, true, nil
	}
	_ = results.Close() // with the same error
	var preparing pgx.ErrPreprocessingBatch
	var server *pgconn.PgError
	switch closed := tx.conn.IsClosed(); {
	case ctx.Err() != nil || !errors.As(err, &preparing) && (closed || errors.As(err, &server)):
		tx.refused = err
		return nil, true, err
	case closed: // by pgx, for example because an argument can't be encoded
		tx.pooled.Release()
		if err := tx.connect(ctx); err != nil {
			tx.pooled = nil
			return nil, true, tx.refuse(err)
		}
	}
	tx.Tx = nil
	return nil, false, nil
}

// isFirst reports whether a statement is the first, and can be in one message with BEGIN. An empty one can't, and
// neither can COPY.
func (tx *LazyTx) isFirst(sql string, arguments []any) bool {
	sql = strings.TrimSpace(sql)
	if tx.Tx != nil || tx.ended || tx.mode == pgx.QueryExecModeSimpleProtocol || sql == "" ||
		len(sql) > 4 && strings.EqualFold(sql[:4], "copy") {
		return false
	}
	if len(arguments) > 0 {
		switch arguments[0].(type) {
		case pgx.QueryExecMode, pgx.QueryResultFormats, pgx.QueryResultFormatsByOID:
			return false
		}
	}
	return true
}

// Query runs a statement.
func (tx *LazyTx) Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error) {
	if tx.isFirst(sql, arguments) {
		batch := &pgx.Batch{}
		batch.Queue(sql, arguments...)
		if results, sent, err := tx.sendFirst(ctx, batch); sent {
			if err != nil {
				return failedRows(err)
			}
			return queryLast(results)
		}
	}
	if err := tx.start(ctx); err != nil {
		return failedRows(err)
	}
	return tx.Tx.Query(ctx, sql, arguments...)
}

// failedRows returns an error, and rows that have it, because callers may look there only.
func failedRows(err error) (pgx.Rows, error) {
	return pgx.FailedBatchResults(&pgx.Batch{}, err).Query()
}

// QueryRow runs a statement.
func (tx *LazyTx) QueryRow(ctx context.Context, sql string, arguments ...any) pgx.Row {
	if tx.isFirst(sql, arguments) {
		rows, err := tx.Query(ctx, sql, arguments...)
		return RowOf(rows, err)
	}
	if err := tx.start(ctx); err != nil {
		return RowOf(nil, err)
	}
	return tx.Tx.QueryRow(ctx, sql, arguments...)
}

// RowOf returns the first of rows, or the error of the statement.
func RowOf(rows pgx.Rows, err error) pgx.Row { return &firstRow{rows, err} }

type firstRow struct {
	rows pgx.Rows
	err  error
}

// Scan reads the row. If there is none, it returns pgx.ErrNoRows.
func (r *firstRow) Scan(targets ...any) error {
	if r.err != nil {
		return r.err
	}
	defer r.rows.Close()
	if !r.rows.Next() {
		if err := r.rows.Err(); err != nil {
			return err
		}
		return pgx.ErrNoRows
	}
	if err := r.rows.Scan(targets...); err != nil {
		return err
	}
	r.rows.Close()
	return r.rows.Err()
}

// Exec runs a statement, or several without arguments.
func (tx *LazyTx) Exec(ctx context.Context, sql string, arguments ...any) (pgconn.CommandTag, error) {
	isScript := len(arguments) == 0 && tx.mode == pgx.QueryExecModeExec // which doesn't prepare it
	if !isScript && tx.isFirst(sql, arguments) {
		batch := &pgx.Batch{}
		batch.Queue(sql, arguments...)
		if results, sent, err := tx.sendFirst(ctx, batch); sent {
			if err != nil {
				return pgconn.CommandTag{}, err
			}
			tag, err := results.Exec()
			if closeErr := results.Close(); err == nil {
				err = closeErr
			}
			return tag, err
		}
	}
	if err := tx.start(ctx); err != nil {
		return pgconn.CommandTag{}, err
	}
	return tx.Tx.Exec(ctx, sql, arguments...)
}

// SendBatch sends statements.
func (tx *LazyTx) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	if batch.Len() > 0 && tx.isFirst(batch.QueuedQueries[0].SQL, nil) {
		if results, sent, err := tx.sendFirst(ctx, batch); sent {
			if err != nil {
				return pgx.FailedBatchResults(batch, err)
			}
			return results
		}
	}
	if err := tx.start(ctx); err != nil {
		return pgx.FailedBatchResults(batch, err)
	}
	return tx.Tx.SendBatch(ctx, batch)
}

// Begin begins a nested transaction.
func (tx *LazyTx) Begin(ctx context.Context) (pgx.Tx, error) {
	if err := tx.start(ctx); err != nil {
		return nil, err
	}
	return tx.Tx.Begin(ctx)
}

// CopyFrom copies rows.
func (tx *LazyTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string,
	rows pgx.CopyFromSource,
) (int64, error) {
	if err := tx.start(ctx); err != nil {
		return 0, err
	}
	return tx.Tx.CopyFrom(ctx, table, columns, rows)
}

// Prepare prepares a statement.
func (tx *LazyTx) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if err := tx.start(ctx); err != nil {
		return nil, err
	}
	return tx.Tx.Prepare(ctx, name, sql)
}

// LargeObjects returns the large objects.
func (tx *LazyTx) LargeObjects() pgx.LargeObjects {
	_ = tx.start(tx.ctx) // then its methods fail
	return tx.Tx.LargeObjects()
}

// Conn returns the connection, on which anything may be sent.
func (tx *LazyTx) Conn() *pgx.Conn {
	_ = tx.start(tx.ctx) // then what is sent on it fails
	return tx.conn
}

// Commit commits, if anything was sent. An error of the server itself, and a pgx.ErrPreprocessingBatch, which comes
// before the message, say that the transaction was rolled back. If a hook panics in Commit, Rollback must follow.
func (tx *LazyTx) Commit(ctx context.Context) error {
	switch {
	case tx.ended:
		return pgx.ErrTxClosed
	case tx.Tx == nil:
		tx.end()
		return nil
	}
	err := tx.Tx.Commit(ctx)
	if tx.conn.IsClosed() || tx.conn.PgConn().TxStatus() == 'I' {
		tx.end()
	} else {
		_ = tx.Rollback(ctx) // which closes the connection if it fails
	}
	return err
}

// Rollback rolls back the statements that were sent.
func (tx *LazyTx) Rollback(ctx context.Context) error {
	if tx.ended {
		return pgx.ErrTxClosed
	}
	defer tx.end()
	if tx.Tx == nil {
		return nil
	}
	return tx.Tx.Rollback(ctx)
}

func (tx *LazyTx) end() {
	tx.ended = true
	if tx.pooled != nil {
		tx.pooled.Release()
	}
}

// queryLast returns the rows of the last statement of a batch, which end it.
func queryLast(results pgx.BatchResults) (pgx.Rows, error) {
	rows, err := results.Query()
	if err != nil {
		_ = results.Close() // with the same error
		return rows, err
	}
	return &lastRows{Rows: rows, results: results}, nil
}

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

// Scan reads the row. If that fails, it closes the rows, as pgx does.
func (r *lastRows) Scan(targets ...any) error {
	err := r.Rows.Scan(targets...)
	if err != nil {
		r.Close()
	}
	return err
}

// Values returns the values of the row. If that fails, it closes the rows.
func (r *lastRows) Values() ([]any, error) {
	values, err := r.Rows.Values()
	if err != nil {
		r.Close()
	}
	return values, err
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
