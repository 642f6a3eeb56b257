package integration_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// seemDistributed makes a table by which Limiters believe that Citus distributes the buckets, as its catalog does: they send the
// statements that name one row each, which are plain SQL.
func (b *bundle) seemDistributed(t *testing.T) {
	t.Helper()
	if !isOnCitus(t, b) {
		b.exec(t, `SET allow_system_table_mods = on; CREATE TABLE pg_catalog.pg_dist_partition (logicalrelid regclass);
			INSERT INTO pg_catalog.pg_dist_partition VALUES ('ratelimit.buckets'); RESET allow_system_table_mods`)
	}
}

// setupRouted is setup with buckets that seem to be distributed.
func setupRouted(t *testing.T) *bundle {
	t.Helper()
	b := setup(t, func(c *pgxpool.Config) { c.MaxConns = 2 * racers })
	b.seemDistributed(t)
	b.limiter = b.with(t, ratelimit.Config{})
	return b
}

func isOnCitus(t *testing.T, b *bundle) (isThere bool) {
	t.Helper()
	require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_extension WHERE extname = 'citus')`).Scan(&isThere))
	return isThere
}

// TestRoutedStatementsRefuseWithoutWaiting promises that a refusal outside of a transaction waits for no row of several.
func TestRoutedStatementsRefuseWithoutWaiting(t *testing.T) {
	t.Parallel()
	b := setupRouted(t)
	limit := ratelimit.Define("once", hoard(1))
	d, err := b.limiter.Take(t.Context(), limit.For("k"))
	require.NoError(t, err)
	require.True(t, d.Allowed)
	blocker := b.begin(t, pgx.ReadCommitted)
	_, err = blocker.Exec(t.Context(), `SELECT FROM ratelimit.buckets WHERE key = 'k' FOR NO KEY UPDATE`)
	require.NoError(t, err)
	two := ratelimit.Define("twice", hoard(1))
	d, err = b.limiter.Take(t.Context(), limit.For("k"), two.For("k"))
	require.NoError(t, err)
	require.False(t, d.Allowed)
}

// TestRoutedStatementsPrune promises that Prune deletes the rows that are full, and no other, also those past the first page, and that it waits for
// no row.
func TestRoutedStatementsPrune(t *testing.T) {
	t.Parallel()
	b := setupRouted(t)
	limit, other := ratelimit.Define("b-pruned", hoard(10)), ratelimit.Define("a-pruned", hoard(10))
	b.exec(t, `INSERT INTO ratelimit.buckets (name, key, shard, value, ts)
		SELECT n, 'k' || i, 0, CASE WHEN i % 3 = 0 THEN 5 ELSE 10 END, 0 FROM generate_series(1, 1200) i, unnest(ARRAY['a-pruned', 'b-pruned', 'c-kept']) n`)
	b.exec(t, `UPDATE ratelimit.buckets SET ts = 253402300799999999 WHERE key = 'k1'`)
	blocker := b.begin(t, pgx.ReadCommitted)
	_, err := blocker.Exec(t.Context(), `SELECT FROM ratelimit.buckets WHERE name = 'a-pruned' AND key = 'k2' FOR UPDATE`)
	require.NoError(t, err)
	noon := time.Date(1970, 1, 2, 12, 0, 0, 0, time.UTC)
	n, err := b.with(t, ratelimit.Config{AsOf: func() time.Time { return noon }}).Prune(t.Context(), limit, other)
	require.NoError(t, err)
	require.EqualValues(t, 2*(800-1)-1, n)
	rows := b.rows(t, "k")
	require.Len(t, rows, 3*1200-int(n))
}
