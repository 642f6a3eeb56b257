package store

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

// TestOnlyAnOwnTxIsRelaxed protects other transactions: one over several servers of Citus could lose half of its rows.
func TestOnlyAnOwnTxIsRelaxed(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	own := NewOwnTx(conn.Conn(), conn.Release)
	t.Cleanup(func() { require.NoError(t, own.Rollback(context.WithoutCancel(t.Context()))) }) // the pool waits for the connection
	for want, tx := range map[string]Conn{"on": begin(t, pool), "off": own} {
		u := &Unit{Store: New(Options{Schema: DefaultSchema, RelaxedCommit: true}), conn: tx, mode: ownTx}
		_, err := tx.Exec(t.Context(), "SET LOCAL synchronous_commit TO on")
		require.NoError(t, err)
		require.NoError(t, u.relax(t.Context(), bucket.NewPage()))
		rows, err := tx.Query(t.Context(), "SHOW synchronous_commit")
		require.NoError(t, err)
		found, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[string])
		require.NoError(t, err)
		require.Equal(t, want, found)
	}
}
