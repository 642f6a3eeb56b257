package integration_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
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

// TestRoutedStatementsGiveBack promises that unused prefetched tokens are returned.
func TestRoutedStatementsGiveBack(t *testing.T) {
	t.Parallel()
	b := setupRouted(t)
	limit := hotLimit("ahead", 20_000)
	told := &aheads{}
	limiter := b.with(t, ratelimit.Config{Observer: told})
	var admitted atomic.Int64
	require.NoError(t, atonce.Do(4, func(int) error {
		for range 400 {
			d, err := limiter.Take(t.Context(), limit.For("hot"))
			if err != nil {
				return err
			}
			if d.Allowed {
				admitted.Add(1)
			}
		}
		return nil
	}))
	require.NoError(t, limiter.Close(t.Context()))
	require.Positive(t, told.fetches)
	v, err := b.limiter.Value(t.Context(), limit.For("hot"))
	require.NoError(t, err)
	require.EqualValues(t, 1600, admitted.Load())
	require.InDelta(t, 20_000-1600, v.Tokens+told.lost, 2, "what was taken is what was used")
}

// TestRoutedStatementsExchangePrices promises that processes tell each other of an upstream.
func TestRoutedStatementsExchangePrices(t *testing.T) {
	t.Parallel()
	b := setupRouted(t)
	clock := &clock{}
	clock.set(time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC))
	upstream := ratelimit.Define("upstream", ratelimit.Adaptive{Contract: ratelimit.PerSecond(100), Apply: true}).For("k")
	limiter := b.with(t, ratelimit.Config{AsOf: clock.now})
	require.NoError(t, limiter.Report(t.Context(), upstream, ratelimit.Outcome{Throttled: true, RetryAfter: time.Hour}))
	require.NoError(t, limiter.Close(t.Context()))
	var outcomes int
	var paused int64
	require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT outcomes, paused_until_us FROM ratelimit.prices`).Scan(&outcomes, &paused))
	require.Equal(t, 1, outcomes)
	require.Equal(t, clock.now().Add(time.Hour).UnixMicro(), paused)
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
