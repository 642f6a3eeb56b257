package driver_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
)

func connectorOf(t testing.TB, url string, dial dial) driver.Connector {
	t.Helper()
	config, err := pgx.ParseConfig(url)
	require.NoError(t, err)
	config.DialFunc = pgconn.DialFunc(dial)
	return stdlib.GetConnector(*config)
}

func TestStdlib(t *testing.T) {
	t.Parallel()
	run(t, testedDriver{IsPgx: true, Open: func(t testing.TB, url string, dial dial) *sql.DB {
		t.Helper()
		return sql.OpenDB(connectorOf(t, url, dial))
	}})
}

// TestOtherDriver is for drivers whose connections cannot be reached, for example a tracing driver: the Limiter uses only the
// interface of database/sql. lib/pq is such a driver.
func TestOtherDriver(t *testing.T) {
	t.Parallel()
	run(t, testedDriver{Prepares: true, Open: func(t testing.TB, url string, dial dial) *sql.DB {
		t.Helper()
		return sql.OpenDB(hiding{connectorOf(t, url, dial)})
	}})
}

// hiding is a driver that shows no more of another's connections than it has to.
type hiding struct{ driver.Connector }

// Connect connects.
func (h hiding) Connect(ctx context.Context) (driver.Conn, error) {
	of, err := h.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return hidden{of, of.(driver.ConnBeginTx), of.(driver.ExecerContext), of.(driver.QueryerContext), of.(driver.SessionResetter)}, nil
}

// hidden is a connection, without the methods that only pgx has.
type hidden struct {
	driver.Conn
	driver.ConnBeginTx
	driver.ExecerContext
	driver.QueryerContext
	driver.SessionResetter
}
