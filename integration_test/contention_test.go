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
)

// Every commit of one takes the row from all that run beside it, and each transaction lasts as long as a
// short round of an application does.
func TestInTxGetsAllOfManyWorkersThroughOnOneKey(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "hundreds of transactions, each of which waits")
	const workers, each = 32, 20
	s := newStand(t, func(config *pgxpool.Config) { config.MaxConns = workers })
	ctx := t.Context()
	var attempts, most atomic.Int64
	start := time.Now()
	require.NoError(t, atonce.Do(workers, func(worker int) error {
		for n := range each {
			runs := int64(0)
			err := s.limiter.InTx(ctx, func(tx pgx.Tx) error {
				runs++
				if err := s.send(ctx, tx, "ada"); err != nil {
					return err
				}
				_, err := tx.Exec(ctx, `SELECT pg_sleep(0.005)`)
				return err
			})
			if err != nil {
				return fmt.Errorf("worker %d, transaction %d: %w", worker, n, err)
			}
			attempts.Add(runs)
			for seen := most.Load(); runs > seen && !most.CompareAndSwap(seen, runs); seen = most.Load() {
			}
		}
		return nil
	}))
	took := time.Since(start)
	const commits = workers * each
	perCommit := float64(attempts.Load()) / commits
	t.Logf("%d workers, %d commits of a 5 ms transaction on one key in %v: %.2f attempts per commit, at most %d",
		workers, commits, took.Round(time.Millisecond), perCommit, most.Load())
	require.Less(t, perCommit, 30.0)
	s.requireSent(t, commits)
	s.requireHealthy(t)
}
