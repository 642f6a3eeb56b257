package integration_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Many processes, none of which knows of the others' transactions, take from one hot bucket in transactions of some length. On one
// row each commit aborts all concurrent transactions; on several rows only the transactions on the same row. The times are logged,
// but not asserted, because they depend on the machine.
func TestShardsKeepTheTransactionsOfManyProcessesApart(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "hundreds of transactions, each of which waits")
	const processes, commits = 32, 10
	b := setup(t, func(c *pgxpool.Config) { c.MaxConns = processes })
	for _, shards := range []int{1, 8} { // one after the other, on the same machine
		hot := ratelimit.Define(fmt.Sprint("hot/", shards), ratelimit.TokenBucket{Rate: 1 << 12, Period: century, Shards: shards})
		var attempts atomic.Int64
		start := time.Now()
		require.NoError(t, atonce.Do(processes, func(int) error {
			limiter, err := ratelimit.New(b.pool, ratelimit.Config{MaxAttempts: 1000})
			if err != nil {
				return err
			}
			for range commits {
				err := limiter.InTx(t.Context(), func(tx pgx.Tx) error {
					attempts.Add(1)
					if err := takeAndCheck(t.Context(), limiter.WithTx(tx), []ratelimit.Request{hot.Global()}); err != nil {
						return err
					}
					_, err := tx.Exec(t.Context(), `SELECT pg_sleep(0.002)`)
					return err
				})
				if err != nil {
					return err
				}
			}
			return nil
		}))
		took := time.Since(start)
		const all = processes * commits
		t.Logf("%d shards: %d commits of a 2 ms transaction by %d processes in %v, %.0f a second, %.2f attempts each",
			shards, all, processes, took.Round(time.Millisecond), all/took.Seconds(), float64(attempts.Load())/all)
		require.InDelta(t, 1<<12-all, tokens(t, b.limiter, hot.Global()), 1e-3)
	}
}
