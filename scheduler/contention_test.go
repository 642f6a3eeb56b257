package scheduler_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

// TestSerializableWorkersLoseNothing promises exact sums where 32 workers of River each take from one bucket, reserve
// from another, and enqueue the next job, all in one SERIALIZABLE transaction that conflicts with the others': each
// step is committed once, with its token and its job.
func TestSerializableWorkersLoseNothing(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "hundreds of transactions that conflict")
	const workers, steps, enough = 32, 12, 1e6
	plenty := ratelimit.TokenBucket{Rate: enough, Period: 36525 * ratelimit.Day}
	taken, reserved := ratelimit.Define("taken", plenty), ratelimit.Define("reserved", plenty)
	pool := postgrestest.New(t, func(c *pgxpool.Config) { c.MaxConns = workers + 8 })
	require.NoError(t, scheduler.Migrate(t.Context(), pool, scheduler.MigrateConfig{}))
	f := setupOn(t, pool, stopped, func(s *settings) {
		s.river.Queues = map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: workers}}
	})
	_, err := pool.Exec(t.Context(), `CREATE TABLE public.steps (chain integer, step integer, PRIMARY KEY (chain, step))`)
	require.NoError(t, err)
	enqueue := func(ctx context.Context, tx pgx.Tx, chain, step int) error {
		_, err := f.scheduler.Enqueue(ctx, f.client, tx, taskArgs{Name: fmt.Sprint(chain, " ", step)}, nil, reserved.Global())
		return err
	}
	events := f.start(t, func(ctx context.Context, job *river.Job[taskArgs]) error {
		var chain, step int
		if _, err := fmt.Sscan(job.Args.Name, &chain, &step); err != nil {
			return err
		}
		return f.limiter.InTx(ctx, func(tx pgx.Tx) error {
			if err := f.limiter.WithTx(tx).Require(ctx, taken.Global()); err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, `INSERT INTO public.steps VALUES ($1, $2)`, chain, step); err != nil || step == steps {
				return err
			}
			return enqueue(ctx, tx, chain, step+1)
		})
	})
	var group errgroup.Group
	for chain := range workers {
		group.Go(func() error {
			return f.limiter.InTx(t.Context(), func(tx pgx.Tx) error { return enqueue(t.Context(), tx, chain, 1) })
		})
	}
	require.NoError(t, group.Wait())
	await(t, events, workers*steps, river.EventKindJobCompleted)
	require.Equal(t, workers*steps, one[int](t, pool, `SELECT count(*) FROM public.steps`))
	require.Equal(t, workers*steps, one[int](t, pool, `SELECT count(*) FROM river_job WHERE kind = 'task' AND state = 'completed'`))
	require.Equal(t, workers*steps, f.jobs(t))
	require.Zero(t, f.open(t))
	require.InDelta(t, enough-workers*steps, f.held(t, taken, ""), 1e-6)
	require.InDelta(t, enough-workers*steps, f.held(t, reserved, ""), 1e-6)
}
