package integration_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// A row that is updated all the time leaves a dead version behind each time. None of them must touch the index, so that the next
// statement can prune the page and the table stays as small as it was.
//
//nolint:paralleltest // a transaction that others keep open, in whatever database, keeps dead versions from being cleaned
func TestHotRowStaysSmall(t *testing.T) {
	const takers, perTaker, megabyte = 4, 4_000, 1 << 20
	testsize.Long(t, "thousands of updates, one after the other")
	b := setup(t)
	hot := ratelimit.Define("hot", hoard(1e6)).For("key")
	require.NoError(t, b.limiter.Reset(t.Context(), hot))
	single := b.with(t, ratelimit.Config{NoBatching: true})
	require.NoError(t, atonce.Do(takers, func(int) error {
		for range perTaker {
			if err := single.Require(t.Context(), hot); err != nil {
				return err
			}
		}
		return nil
	}))
	require.InDelta(t, 1e6-takers*perTaker, b.row(t, "hot", "key").Value, 100, "all of the updates were made")

	var made, inPlace, size int64
	conn := lastSession(t, b.pool)
	eventually(t, "the sessions report what they did", func() bool {
		require.NoError(t, conn.QueryRow(t.Context(), `
			SELECT sum(n_tup_upd)::bigint, sum(n_tup_hot_upd)::bigint, max(pg_total_relation_size(relid)) FROM pg_stat_user_tables WHERE relname LIKE 'buckets%'`).Scan(&made, &inPlace, &size))
		return made >= takers*perTaker
	})
	require.GreaterOrEqual(t, float64(inPlace)/float64(made), 0.95)
	require.Less(t, size, int64(megabyte))
}
