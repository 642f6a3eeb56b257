package memory

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/engine/store"
)

// OpenSQL returns a *sql.DB with transactions of the pool's DB, and of rows if that is not nil: rows runs the
// statements of the application.
func (p Pool) OpenSQL(rows *sql.DB) *sql.DB { return sql.OpenDB(&connector{db: p.db, rows: rows}) }

type connector struct {
	db   *DB
	rows *sql.DB // nil: there is none
}

// Connect takes a connection of the other database, if there is one.
func (c *connector) Connect(ctx context.Context) (driver.Conn, error) {
	own := &sqlConn{connector: c}
	if c.rows == nil {
		return own, nil
	}
	var err error
	if own.rows, err = c.rows.Conn(ctx); err != nil {
		return nil, err
	}
	return own, nil
}

// Driver returns the connector, from which package sqllimit gets the Engine of a *sql.DB.
func (c *connector) Driver() driver.Driver { return c }

// Open is for sql.Open, which this driver is not registered for.
func (c *connector) Open(string) (driver.Conn, error) { return c.Connect(context.Background()) }

// Engine returns the Engine for calls outside a transaction.
func (c *connector) Engine() store.Ledgers { return &Tx{DB: c.db, alone: true} }

type sqlConn struct {
	*connector

	rows   *sql.Conn // nil: there is no other database
	tx     *Tx       // nil: none was begun
	rowsTx *sql.Tx
	marks  []savepoint
}

type savepoint struct {
	name string
	mark mark
}

// Visitor is a parameter that wants the Engine of the connection that it is given to, and no statement sent.
type Visitor interface {
	VisitEngine(engine store.Ledgers)
}

// errVisited ends the statement of a Visitor.
var errVisited = errors.New("ratelimittest: done before the statement, which is not sent")

// CheckNamedValue leaves parameters to the other database.
func (c *sqlConn) CheckNamedValue(v *driver.NamedValue) error {
	visitor, visits := v.Value.(Visitor)
	switch {
	case visits && c.tx != nil:
		visitor.VisitEngine(c.tx)
		return errVisited
	case visits:
		return errVisited
	}
	return nil
}

// Begin is BeginTx.
func (c *sqlConn) Begin() (driver.Tx, error) {
	return c.BeginTx(context.Background(), driver.TxOptions{})
}

// BeginTx begins a transaction, in the other database too if there is one. The options are for the other database.
func (c *sqlConn) BeginTx(ctx context.Context, options driver.TxOptions) (driver.Tx, error) {
	if c.rows != nil {
		var err error
		// database/sql rolls back when ctx ends, here and so there.
		c.rowsTx, err = c.rows.BeginTx(context.WithoutCancel(ctx), &sql.TxOptions{
			Isolation: sql.IsolationLevel(options.Isolation), ReadOnly: options.ReadOnly,
		})
		if err != nil {
			return nil, err
		}
	}
	c.tx, c.marks = c.db.Begin(), nil
	return c, nil
}

// Commit commits in the other database first. If that fails, nothing is kept here.
func (c *sqlConn) Commit() error {
	if c.tx.isFailed() { // as a COMMIT of a failed transaction
		return errors.Join(pgx.ErrTxCommitRollback, c.Rollback())
	}
	tx, rows := c.end()
	if rows != nil {
		if err := rows.Commit(); err != nil {
			return errors.Join(err, tx.rollback())
		}
	}
	return tx.commit()
}

// Rollback rolls back in both.
func (c *sqlConn) Rollback() error {
	tx, rows := c.end()
	if rows != nil {
		return errors.Join(rows.Rollback(), tx.rollback())
	}
	return tx.rollback()
}

// end returns the transaction, which is the connection's no more.
func (c *sqlConn) end() (tx *Tx, rows *sql.Tx) {
	tx, rows = c.tx, c.rowsTx
	c.tx, c.rowsTx, c.marks = nil, nil, nil
	return tx, rows
}

// Close gives the other database's connection back.
func (c *sqlConn) Close() error {
	if c.rows == nil {
		return nil
	}
	return c.rows.Close()
}

// ofSavepoint finds the statements that set, undo and release a savepoint.
var ofSavepoint = regexp.MustCompile(`(?i)^\s*(SAVEPOINT|ROLLBACK\s+TO(?:\s+SAVEPOINT)?|RELEASE(?:\s+SAVEPOINT)?)\s+("[^"]+"|\w+)\s*;?\s*$`)

// save repeats a statement of a savepoint of the other database in the DB.
func (c *sqlConn) save(verb, name string) error {
	if strings.EqualFold(verb, "savepoint") {
		c.tx.mu.Lock()
		defer c.tx.mu.Unlock()
		c.marks = append(c.marks, savepoint{name, c.tx.mark()})
		return nil
	}
	for i := len(c.marks) - 1; i >= 0; i-- {
		if c.marks[i].name != name {
			continue
		}
		if strings.EqualFold(verb[:3], "rel") {
			c.marks = c.marks[:i]
			return nil
		}
		c.marks = c.marks[:i+1]
		return c.tx.backTo(c.marks[i].mark)
	}
	c.tx.Spoil(context.Background(), nil)
	return failure("3B001", fmt.Sprintf("savepoint %q does not exist", name))
}

// isSavepoint reports whether query is a statement of a savepoint, and returns its error in the DB.
func (c *sqlConn) isSavepoint(query string) (bool, error) {
	found := ofSavepoint.FindStringSubmatch(query)
	if c.tx == nil || found == nil {
		return false, nil
	}
	return true, c.save(found[1], found[2])
}

// ExecContext runs a statement in the other database.
func (c *sqlConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	isSavepoint, err := c.isSavepoint(query)
	switch {
	case err != nil:
		return nil, err
	case c.rowsTx != nil:
		return c.rowsTx.ExecContext(ctx, query, arguments(args)...)
	case c.rows != nil:
		return c.rows.ExecContext(ctx, query, arguments(args)...)
	case isSavepoint:
		return driver.ResultNoRows, nil
	}
	return nil, ErrNoDatabase
}

// QueryContext runs a statement that answers with rows in the other database.
func (c *sqlConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	queries := interface {
		QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	}(c.rows)
	switch {
	case c.rows == nil:
		return nil, ErrNoDatabase
	case c.rowsTx != nil:
		queries = c.rowsTx
	}
	rows, err := queries.QueryContext(ctx, query, arguments(args)...) //nolint:rowserrcheck // Next looks at it
	if err != nil {
		return nil, err
	}
	names, err := rows.Columns()
	if err != nil {
		return nil, errors.Join(err, rows.Close()) //nolint:sqlclosecheck // else database/sql closes them
	}
	return &sqlRows{rows, names}, nil
}

// Prepare keeps the text of a statement, which the other database is given when it runs.
func (c *sqlConn) Prepare(query string) (driver.Stmt, error) {
	if c.rows == nil {
		return nil, ErrNoDatabase
	}
	return &sqlStmt{c, query}, nil
}

func arguments(args []driver.NamedValue) []any {
	all := make([]any, len(args))
	for i, a := range args {
		if all[i] = a.Value; a.Name != "" {
			all[i] = sql.Named(a.Name, a.Value)
		}
	}
	return all
}

type sqlStmt struct {
	conn  *sqlConn
	query string
}

// Close does nothing.
func (*sqlStmt) Close() error { return nil }

// NumInput leaves it to the other database to count.
func (*sqlStmt) NumInput() int { return -1 }

// Exec is ExecContext.
func (s *sqlStmt) Exec(args []driver.Value) (driver.Result, error) {
	return s.conn.ExecContext(context.Background(), s.query, named(args))
}

// Query is QueryContext.
func (s *sqlStmt) Query(args []driver.Value) (driver.Rows, error) {
	return s.conn.QueryContext(context.Background(), s.query, named(args))
}

// ExecContext runs it.
func (s *sqlStmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	return s.conn.ExecContext(ctx, s.query, args)
}

// QueryContext runs it.
func (s *sqlStmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	return s.conn.QueryContext(ctx, s.query, args)
}

func named(args []driver.Value) []driver.NamedValue {
	all := make([]driver.NamedValue, len(args))
	for i, v := range args {
		all[i] = driver.NamedValue{Ordinal: i + 1, Value: v}
	}
	return all
}

// sqlRows are rows of the other database.
type sqlRows struct {
	*sql.Rows

	names []string
}

// Columns returns their names.
func (r *sqlRows) Columns() []string { return r.names }

// Next reads a row.
func (r *sqlRows) Next(values []driver.Value) error {
	if !r.Rows.Next() {
		if err := r.Err(); err != nil {
			return err
		}
		return io.EOF
	}
	into := make([]any, len(values))
	for i := range values {
		into[i] = (*any)(&values[i])
	}
	return r.Scan(into...)
}
