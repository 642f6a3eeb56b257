// Package postgres gives a test a Postgres of its own, with the tables of the limiter: for what a Limiter in memory, see package
// ratelimittest, has none of, which is SQL beside the limits, isolation levels, and rules in tables.
//
//	pool := postgres.New(t)
//	limiter, err := ratelimit.New(pool, ratelimit.Config{AsOf: clock.Now})
//
// The server is, in this order, the one that RATELIMIT_DATABASE_URL or else DATABASE_URL names, programs of Postgres on the
// machine, a container, or one that is downloaded. RATELIMIT_POSTGRES=local, docker or embedded forces one of the latter. Containers and
// downloads work only in a checkout of pgratelimit, and without -trimpath: set the variable, or install Postgres.
// Tests of a process share the server, and each has a database that is dropped after it. Where there is none to be had, the test is
// skipped with the reason, and fails when CI is set.
//
// It is a package of its own because it brings what starts containers: import it in tests.
package postgres

import (
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

// New returns a pool on a database of the test's own, in which migrations.Up has made the tables in the schema ratelimit. When
// the test ends, the pool is closed and the database dropped. Each configure may change the pool's configuration before it is
// made.
func New(t testing.TB, configure ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	return postgrestest.New(t, configure...)
}

// URL returns the connection string of such a database, for tests that connect by themselves.
func URL(t testing.TB) string {
	t.Helper()
	return postgrestest.NewDatabase(t)
}
