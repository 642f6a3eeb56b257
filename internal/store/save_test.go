package store

import (
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// A record that is inserted in the message of COMMIT is behind a bound: its table may be locked, and COMMIT has little time.
func TestARecordWithCommitIsBehindABound(t *testing.T) {
	t.Parallel()
	asks := []bucket.Ask{still("still", 10).ask("ada", 1)}
	engine := postgres{}
	tx := NewOwnTx(nil, func() {})
	u := &Unit{Store: New(Options{Schema: DefaultSchema, AsOf: standing}), conn: tx, mode: ownTx}
	bound := &pgx.Batch{}
	engine.QueueBound(bound, u, lateWait)
	require.NoError(t, engine.Save(t.Context(), u, bucket.NewPage(asks)))
	require.Empty(t, tx.later.QueuedQueries, "nothing has changed")

	require.NoError(t, engine.Save(t.Context(), u, bucket.NewPage(asks), kept{}))
	sent := tx.later.QueuedQueries
	insert := slices.IndexFunc(sent, func(q *pgx.QueuedQuery) bool { return q.SQL == "SELECT" })
	require.Equal(t, bound.QueuedQueries, sent[:insert])
}
