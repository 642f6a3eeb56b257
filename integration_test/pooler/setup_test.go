// Package pooler_test tests the promises about poolers: each call through PgBouncer in transaction mode, in each query exec mode of
// pgx, and the errors of modes that cannot work.
package pooler_test

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/leaktest"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// No test leaves a goroutine behind, also after faults.
func TestMain(m *testing.M) { leaktest.Main(m) }

// database is one of the test's own, past any pooler, with a table of the application's.
type database struct{ *world.World }

func setup(t *testing.T) *database {
	t.Helper()
	d := &database{world.New(t)}
	d.Exec(t, `CREATE TABLE pooled (who text PRIMARY KEY)`)
	return d
}

// behind returns the connection string of the database through a PgBouncer of the test's own.
func (d *database) behind(t *testing.T, mode postgrestest.PoolMode) string {
	t.Helper()
	return postgrestest.StartPgBouncer(t, d.URL(), mode)
}

// ids makes a reservation and a lease, past any pooler.
func (d *database) ids(t *testing.T) ids {
	t.Helper()
	r, err := d.Limiter.Reserve(t.Context(), roomy.For("there"))
	require.NoError(t, err)
	lease, err := d.Limiter.Acquire(t.Context(), slots.For("there"))
	require.NoError(t, err)
	return ids{
		r.At,
		func(context.Context, *ratelimit.Limiter) (string, error) { return r.ID, nil },
		func(context.Context, *ratelimit.Limiter) (string, error) { return lease.ID, nil },
	}
}

// contents returns the rows of the tables that calls write.
func (d *database) contents(t *testing.T) []string {
	t.Helper()
	rows, err := d.Pool.Query(t.Context(), `SELECT b::text FROM ratelimit.buckets b UNION ALL SELECT r::text FROM ratelimit.reservations r
		UNION ALL SELECT f::text FROM ratelimit.fingerprint f UNION ALL SELECT p::text FROM ratelimit.prices p ORDER BY 1`)
	require.NoError(t, err)
	texts, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return texts
}

// connect returns a pool of so many connections.
func connect(t *testing.T, url string, conns int32, configure ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	return world.Open(t, url, append(configure, func(c *pgxpool.Config) { c.MaxConns = conns })...).Pool
}

// limiterOn returns a Limiter whose calls have the time that they take on a busy machine.
func limiterOn(t *testing.T, pool ratelimit.Pool, config ratelimit.Config) *ratelimit.Limiter {
	t.Helper()
	config.Timeout = world.Patient
	limiter, err := ratelimit.New(pool, config)
	require.NoError(t, err)
	return limiter
}

// mode adds a way to run queries to a connection string.
func mode(url, mode string) string {
	separator := "?"
	if strings.Contains(url, separator) {
		separator = "&"
	}
	return url + separator + "default_query_exec_mode=" + mode
}
