package integration_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TestBurstOfNewKeys promises that many new keys in a small table do not make calls slower: no connection keeps a plan
// that reads the whole table.
func TestBurstOfNewKeys(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "it inserts tens of thousands of rows")
	const callers, keys = 32, 50_000
	for _, rows := range []int{0, 5, 200} {
		t.Run(fmt.Sprint(rows), func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			limit := ratelimit.Define("burst", ratelimit.TokenBucket{Rate: 10, Period: century})
			take := func(key string) error {
				d, err := b.limiter.Take(t.Context(), limit.For(key))
				require.True(t, err != nil || d.Allowed, key)
				return err
			}
			b.exec(t, `INSERT INTO ratelimit.buckets SELECT 'burst', 'old ' || n, 0, 5, 0, 5 FROM generate_series(1, $1) AS n`, rows)
			b.exec(t, "ALTER TABLE ratelimit.buckets SET (autovacuum_enabled = off)") // which would end bad plans after a minute
			b.exec(t, "VACUUM ANALYZE ratelimit.buckets")
			group, _ := errgroup.WithContext(t.Context())
			for c := range callers {
				group.Go(func() error {
					for i := range keys / callers {
						if err := take(fmt.Sprint(c, " ", i)); err != nil {
							return err
						}
					}
					return nil
				})
			}
			require.NoError(t, group.Wait())
			b.pool.Reset() // sessions report what they read when they end
			var read int64
			require.Eventually(t, func() bool {
				var inserted int64
				err := b.pool.QueryRow(t.Context(), `SELECT n_tup_ins, seq_tup_read FROM pg_stat_user_tables WHERE relid = 'ratelimit.buckets'::regclass`).Scan(&inserted, &read)
				return err == nil && inserted >= keys/callers*callers
			}, 5*time.Minute, 100*time.Millisecond)
			require.Less(t, read, int64(keys), "fewer rows than one scan of the table reads")
		})
	}
}
