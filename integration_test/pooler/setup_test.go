// Package pooler_test tests the promises about poolers: each call through PgBouncer in transaction mode, in each query exec mode of
// pgx, and the errors of modes that cannot work.
package pooler_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// patient bounds what ends by itself, so that a test that hangs fails. It decides nothing.
const patient = 2 * time.Minute

// database is one of the test's own, with a table of the application's.
type database struct {
	direct *pgxpool.Pool // past any pooler
}

func setup(t *testing.T) *database {
	t.Helper()
	d := &database{direct: postgrestest.New(t)}
	_, err := d.direct.Exec(t.Context(), `CREATE TABLE pooled (who text PRIMARY KEY)`)
	require.NoError(t, err)
	return d
}

// url returns the connection string of the database, past any pooler.
func (d *database) url() string { return d.direct.Config().ConnString() }

// behind returns the connection string of the database through a PgBouncer of the test's own.
func (d *database) behind(t *testing.T, mode postgrestest.PoolMode) string {
	t.Helper()
	return postgrestest.StartPgBouncer(t, d.url(), mode)
}

// count returns what a query counts.
func (d *database) count(t *testing.T, query string, arguments ...any) (n int) {
	t.Helper()
	require.NoError(t, d.direct.QueryRow(t.Context(), query, arguments...).Scan(&n))
	return n
}

// connect returns a pool of so many connections.
func connect(t *testing.T, url string, conns int32, configure ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	config.MaxConns = conns
	for _, change := range configure {
		change(config)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// limiterOn returns a Limiter whose calls have the time that they take on a busy machine.
func limiterOn(t *testing.T, pool ratelimit.Pool, config ratelimit.Config) *ratelimit.Limiter {
	t.Helper()
	config.Timeout = patient
	limiter, err := ratelimit.New(pool, config)
	require.NoError(t, err)
	return limiter
}

// mode adds a way to run queries to a connection string.
func mode(url, mode string) string {
	separator := "?"
	for _, c := range url {
		if c == '?' {
			separator = "&"
		}
	}
	return url + separator + "default_query_exec_mode=" + mode
}
