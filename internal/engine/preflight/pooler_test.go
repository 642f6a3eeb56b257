package preflight_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/preflight"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

// A way to run queries prepares, or does not, as pgx does it.
func TestPrepares(t *testing.T) {
	t.Parallel()
	for mode, prepares := range map[string]bool{
		"cache_statement": true, "describe_exec": true, "cache_describe": false, "exec": false, "simple_protocol": false,
	} {
		config, err := pgx.ParseConfig("postgres://host/database?default_query_exec_mode=" + mode)
		require.NoError(t, err)
		require.Equal(t, prepares, preflight.Prepares(config.DefaultQueryExecMode), mode)
		require.Contains(t, preflight.Mode(config.DefaultQueryExecMode), mode)
	}
	config, err := pgx.ParseConfig("postgres://host/database")
	require.NoError(t, err)
	require.Contains(t, preflight.Mode(config.DefaultQueryExecMode), "pgx's default")
}

// TestIsLost distinguishes a server's errors for lost statements from other errors, such as a pooler's with the same
// SQLSTATE.
func TestIsLost(t *testing.T) {
	t.Parallel()
	database := postgrestest.NewDatabase(t)
	conn, err := pgconn.Connect(t.Context(), database)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	failing := func(name string, parameters ...[]byte) error {
		return conn.ExecPrepared(t.Context(), name, parameters, nil, nil).Read().Err
	}
	_, err = conn.Prepare(t.Context(), "one", "SELECT $1::text", nil)
	require.NoError(t, err)
	require.NoError(t, failing("one", []byte("x")))
	for code, err := range map[string]error{
		"26000": failing("another"),
		"08P01": failing("one"), // without its parameter, as for another client's statement
		"42P05": func() error { _, err := conn.Prepare(t.Context(), "one", "SELECT 2", nil); return err }(),
	} {
		var answer *pgconn.PgError
		require.ErrorAs(t, err, &answer)
		require.Equal(t, code, answer.Code)
		require.True(t, preflight.IsLost(err), code)
	}
	_, err = pgconn.Connect(t.Context(), postgrestest.StartPgBouncer(t, database, postgrestest.TransactionPool)+"&database=no_such")
	var answer *pgconn.PgError
	require.ErrorAs(t, err, &answer)
	require.Equal(t, "08P01", answer.Code, "as PgBouncer has it for whatever goes wrong there")
	_, syntax := conn.Prepare(t.Context(), "wrong", "SELEC", nil)
	for _, other := range []error{nil, errors.New("another"), err, syntax} {
		require.False(t, preflight.IsLost(other), "%v", other)
	}
}

// The test statements leave nothing behind if they are not lost, and otherwise at most one statement.
func TestLoses(t *testing.T) {
	t.Parallel()
	for pool, loses := range map[postgrestest.PoolMode]bool{"": false, postgrestest.SessionPool: false, postgrestest.TransactionPool: true} {
		t.Run(string(pool), func(t *testing.T) {
			t.Parallel()
			url := postgrestest.NewDatabase(t)
			if pool != "" {
				url = postgrestest.StartPgBouncer(t, url, pool)
			}
			config, err := pgx.ParseConfig(url)
			require.NoError(t, err)
			for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeDescribeExec} {
				for range 3 {
					got, err := preflight.Loses(t.Context(), config, mode)
					require.NoError(t, err)
					require.Equal(t, loses, got, mode)
				}
			}
			config.DefaultQueryExecMode = pgx.QueryExecModeExec
			conn, err := pgx.ConnectConfig(t.Context(), config)
			require.NoError(t, err)
			t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
			var left int
			require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*) FROM pg_prepared_statements`).Scan(&left))
			require.LessOrEqual(t, left, 1)
		})
	}
	config, err := pgx.ParseConfig("postgres://nobody@127.0.0.1:1/nothing")
	require.NoError(t, err)
	_, err = preflight.Loses(t.Context(), config, pgx.QueryExecModeCacheStatement)
	require.Error(t, err, "nothing is known")
}

// No test leaves a goroutine behind.
func TestMain(m *testing.M) { testkit.Main(m) }
