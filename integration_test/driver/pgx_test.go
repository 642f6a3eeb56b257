package driver_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"net"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
)

func openStdlib(t testing.TB, url string, dial func(ctx context.Context, network, address string) (net.Conn, error)) *sql.DB {
	t.Helper()
	return sql.OpenDB(connectorOf(t, url, dial))
}

func connectorOf(t testing.TB, url string, dial func(ctx context.Context, network, address string) (net.Conn, error)) driver.Connector {
	t.Helper()
	config, err := pgx.ParseConfig(url)
	require.NoError(t, err)
	config.DialFunc = dial
	return stdlib.GetConnector(*config)
}

func TestStdlib(t *testing.T) {
	t.Parallel()
	run(t, testedDriver{Open: openStdlib, IsPgx: true})
}

// TestOtherDriver is for drivers whose connections cannot be reached, for example a tracing driver: the Limiter uses only the
// interface of database/sql. lib/pq is such a driver.
func TestOtherDriver(t *testing.T) {
	t.Parallel()
	run(t, testedDriver{Open: func(t testing.TB, url string, dial func(ctx context.Context, network, address string) (net.Conn, error)) *sql.DB {
		t.Helper()
		return sql.OpenDB(hiding{connectorOf(t, url, dial)})
	}, Prepares: true})
}

// hiding is a driver that shows no more of another's connections than it has to.
type hiding struct{ driver.Connector }

// Connect connects.
func (h hiding) Connect(ctx context.Context) (driver.Conn, error) {
	of, err := h.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return hidden{of.(hiddenConn)}, nil
}

// hiddenConn is what the driver's connections have.
type hiddenConn interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ExecerContext
	driver.QueryerContext
	driver.SessionResetter
}

// hidden is a connection.
type hidden struct{ of hiddenConn }

// Prepare prepares a statement.
func (h hidden) Prepare(query string) (driver.Stmt, error) { return h.of.Prepare(query) }

// Close closes the connection.
func (h hidden) Close() error { return h.of.Close() }

// Begin is not called, as there is BeginTx.
func (h hidden) Begin() (driver.Tx, error) { return nil, driver.ErrSkip }

// BeginTx begins a transaction.
func (h hidden) BeginTx(ctx context.Context, options driver.TxOptions) (driver.Tx, error) {
	return h.of.BeginTx(ctx, options)
}

// ExecContext runs a statement.
func (h hidden) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	return h.of.ExecContext(ctx, query, args)
}

// QueryContext runs a statement that answers with rows.
func (h hidden) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	return h.of.QueryContext(ctx, query, args)
}

// ResetSession says whether the connection can be used again.
func (h hidden) ResetSession(ctx context.Context) error { return h.of.ResetSession(ctx) }
