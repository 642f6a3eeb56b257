// Package world gives a test a database of its own, and a Limiter on it.
package world

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Century is a period in which next to nothing arrives during a test.
const Century = 36525 * ratelimit.Day

// Patient bounds a wait for a state, so that a test that hangs fails. It decides nothing: it is far longer than any
// wait on a busy machine.
const Patient = 2 * time.Minute

// Hoard returns a policy that holds capacity tokens and gains less than a thousandth of one during a test.
func Hoard(capacity float64) ratelimit.TokenBucket {
	return ratelimit.TokenBucket{Rate: capacity, Period: Century}
}

// Eventually polls done until it returns true. It is for states that only the server knows. It polls less often after a
// while, because many tests wait at the same time, and each look costs the server a millisecond.
func Eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline, pause := time.Now().Add(Patient), time.Millisecond; !done(); pause = min(2*pause, 16*time.Millisecond) {
		require.True(t, time.Now().Before(deadline), what)
		time.Sleep(pause)
	}
}

// World is a database and a Limiter on it.
type World struct {
	Pool    *pgxpool.Pool
	Limiter *ratelimit.Limiter
}

// New returns a World on a new, migrated database.
func New(t *testing.T, configure ...func(*pgxpool.Config)) *World {
	t.Helper()
	return on(t, postgrestest.New(t, configure...))
}

// Open returns a World on the database at url, which another process or test has made.
func Open(t *testing.T, url string, configure ...func(*pgxpool.Config)) *World {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	for _, set := range configure {
		set(config)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return on(t, pool)
}

func on(t *testing.T, pool *pgxpool.Pool) *World {
	t.Helper()
	w := &World{Pool: pool}
	w.Limiter = w.With(t, ratelimit.Config{})
	return w
}

// URL returns the connection string of the database.
func (w *World) URL() string { return w.Pool.Config().ConnString() }

// With returns another Limiter on the same rows. A Timeout of 0 means ten minutes, which is enough for a call on a busy
// machine.
func (w *World) With(t *testing.T, config ratelimit.Config) *ratelimit.Limiter {
	t.Helper()
	if config.Timeout == 0 {
		config.Timeout = 10 * time.Minute
	}
	limiter, err := ratelimit.New(w.Pool, config)
	require.NoError(t, err)
	return limiter
}

// Exec executes a statement.
func (w *World) Exec(t *testing.T, sql string, arguments ...any) {
	t.Helper()
	_, err := w.Pool.Exec(t.Context(), sql, arguments...)
	require.NoError(t, err)
}

// Count returns the number that a query returns.
func (w *World) Count(t *testing.T, sql string, arguments ...any) (n int) {
	t.Helper()
	require.NoError(t, w.Pool.QueryRow(t.Context(), sql, arguments...).Scan(&n))
	return n
}

// Begin begins a transaction that ends with the test at the latest, because an open transaction would keep the pool
// from closing.
func (w *World) Begin(t *testing.T, level pgx.TxIsoLevel) pgx.Tx {
	t.Helper()
	tx, err := w.Pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	return tx
}

// Held returns the tokens in the rows of a bucket, without tokens that have arrived since the last write.
func (w *World) Held(t *testing.T, name, key string) (tokens float64) {
	t.Helper()
	require.NoError(t, w.Pool.QueryRow(t.Context(),
		`SELECT sum(value) FROM ratelimit.buckets WHERE name = $1 AND key = $2`, name, key).Scan(&tokens))
	return tokens
}
