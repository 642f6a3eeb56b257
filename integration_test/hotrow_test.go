package integration_test

import (
	"fmt"
	"os"
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
	testsize.Long(t, "a hundred thousand updates")
	const (
		onTheServer = 92_000 // one after the other, as fast as they go
		takers      = 4
		perTaker    = 2_000
		updates     = onTheServer + takers*perTaker
		megabyte    = 1 << 20
		mostInPlace = 0.95
	)
	b := setup(t)
	hot := ratelimit.Define("hot", hoard(1e6))
	require.NoError(t, b.limiter.Reset(t.Context(), hot.For("key")))
	installLoop(t, b)
	b.exec(t, `CALL takes('hot', 'key', 0, 1, 1e6, 1e6, 1, 3155760000000000, 0, 0, NULL, 60000000, NULL, NULL, $1)`, onTheServer)
	single := b.with(t, ratelimit.Config{NoBatching: true})
	require.NoError(t, atonce.Do(takers, func(int) error {
		for range perTaker {
			if err := single.Require(t.Context(), hot.For("key")); err != nil {
				return err
			}
		}
		return nil
	}))
	require.InDelta(t, 1e6-updates, b.row(t, "hot", "key").Value, 100, "all of the updates were made")

	var made, inPlace, size int64
	conn := lastSession(t, b.pool)
	eventually(t, "the sessions report what they did", func() bool {
		require.NoError(t, conn.QueryRow(t.Context(), `
			SELECT sum(n_tup_upd)::bigint, sum(n_tup_hot_upd)::bigint, max(pg_total_relation_size(relid)) FROM pg_stat_user_tables WHERE relname LIKE 'buckets%'`).Scan(&made, &inPlace, &size))
		return made >= updates
	})
	t.Logf("%d updates, %.2f %% of them in place, table and index %d kB", made, 100*float64(inPlace)/float64(made), size>>10)
	require.GreaterOrEqual(t, float64(inPlace)/float64(made), mostInPlace)
	require.Less(t, size, int64(megabyte))
}

// installLoop makes a procedure that executes the very statement of Take, with its $1 to $14, and commits,
// n times.
func installLoop(t *testing.T, b *bundle) {
	t.Helper()
	statement, err := os.ReadFile("../internal/store/sql/bucket_take.sql")
	require.NoError(t, err)
	b.exec(t, fmt.Sprintf(`
		CREATE PROCEDURE takes(text, text, integer, float8, float8, float8, bigint, float8, bigint, float8, bigint, bigint, bigint, bigint, n integer)
		LANGUAGE plpgsql AS $procedure$
		DECLARE outcome record;
		BEGIN
			FOR i IN 1..n LOOP
				%s INTO outcome;
				COMMIT;
			END LOOP;
		END $procedure$`, statement))
}
