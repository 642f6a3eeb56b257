package postgres_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
	"github.com/pgratelimit/pgratelimit/ratelimittest/postgres"
)

var sent = ratelimit.Define("sent", ratelimit.PerHour(5))

// The rows of the code under test and its limits commit and roll back together, wherever the limits are.
func TestCommitTogether(t *testing.T) {
	t.Parallel()
	pool := postgres.New(t)
	_, err := pool.Exec(t.Context(), `CREATE TABLE messages (body text)`)
	require.NoError(t, err)
	for name, db := range map[string]ratelimit.Pool{"Postgres": pool, "Memory": ratelimittest.NewDBWith(pool)} {
		limiter, err := ratelimit.New(db, ratelimit.Config{AsOf: ratelimittest.NewClock().Now})
		require.NoError(t, err)
		send := func(failed error) error {
			return limiter.InTx(t.Context(), func(tx pgx.Tx) error {
				if _, err := limiter.WithTx(tx).Take(t.Context(), sent.For(name)); err != nil {
					return err
				}
				if _, err := tx.Exec(t.Context(), `INSERT INTO messages VALUES ($1)`, name); err != nil {
					return err
				}
				return failed
			})
		}
		require.NoError(t, send(nil))
		failed := errors.New("no")
		require.ErrorIs(t, send(failed), failed)
		v, err := limiter.Value(t.Context(), sent.For(name))
		require.NoError(t, err)
		require.Equal(t, 4.0, v.Tokens, name)
		var rows int
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM messages WHERE body = $1`, name).Scan(&rows))
		require.Equal(t, 1, rows, name)
	}
}

func TestURL(t *testing.T) {
	t.Parallel()
	conn, err := pgx.Connect(t.Context(), postgres.URL(t))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	var buckets int
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*) FROM ratelimit.buckets`).Scan(&buckets))
	require.Zero(t, buckets)
}
