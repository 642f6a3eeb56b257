package scheduler_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

// TestInstall promises that Install is all a River client needs. A client that works jobs guards their turns and slots, and calls
// Maintain. A job whose worker was killed runs again when River has rescued it, and is charged once. The killed worker's slot is free
// when its lease ends, and not before.
func TestInstall(t *testing.T) {
	t.Parallel()
	f := setup(t)
	slot := ratelimit.Define("slot", ratelimit.Concurrency{Most: 1, Lease: time.Second}).Global()
	holder, err := scheduler.NewHolder(f.limiter, scheduler.HolderConfig{
		Requests: func(job *rivertype.JobRow) ([]ratelimit.Request, error) {
			if job.Kind != (taskArgs{}).Kind() {
				return nil, nil
			}
			return []ratelimit.Request{slot}, nil
		},
		MaxSnooze: 50 * time.Millisecond,
	})
	require.NoError(t, err)
	workers, started := river.NewWorkers(), make(chan time.Time, 1)
	river.AddWorker(workers, river.WorkFunc(func(ctx context.Context, _ *river.Job[taskArgs]) error {
		if _, held := ratelimit.LeaseFromContext(ctx); !held {
			return river.JobCancel(errUpstream)
		}
		d, err := f.limiter.Check(ctx, slot)
		started <- d.At
		return err
	}))
	config := &river.Config{
		FetchCooldown: 5 * time.Millisecond, FetchPollInterval: 20 * time.Millisecond, Logger: slog.New(slog.DiscardHandler), TestOnly: true,
		Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 10}}, Workers: workers,
	}
	require.NoError(t, f.scheduler.Install(config, holder))
	f.client, err = river.NewClient(riverpgxv5.New(f.pool), config)
	require.NoError(t, err)

	// No client works the queue of this job: it ends outside of the middleware, and Maintain finds it.
	elsewhere := f.enqueue(t, &scheduler.EnqueueOpts{InsertOpts: river.InsertOpts{Queue: "elsewhere"}}, perSecond.Global())
	_, err = f.client.JobCancel(t.Context(), elsewhere.Job.ID)
	require.NoError(t, err)
	killed := f.enqueue(t, nil, daily.Global().Cost(30))
	_, err = f.limiter.Start(t.Context(), killed.ID)
	require.NoError(t, err)
	lease, err := f.limiter.Acquire(t.Context(), slot) // without a renewal
	require.NoError(t, err)
	_, err = f.pool.Exec(t.Context(), `UPDATE river_job SET state = 'running', attempt = 1, attempted_at = now() - interval '2 hours',
		attempted_by = '{killed}' WHERE id = $1`, killed.Job.ID) // River rescues jobs that have been running for an hour
	require.NoError(t, err)
	events := f.start(t, nil)
	for _, job := range await(t, events, 2, river.EventKindJobCompleted) { // the other one calls Maintain
		require.Equal(t, job.Kind == killed.Job.Kind, job.Attempt == 2, job.Kind)
	}
	require.False(t, (<-started).Before(lease.Until))
	require.Equal(t, ratelimit.Settled, f.state(t, killed.ID))
	require.InDelta(t, 70, f.held(t, daily, ""), 1e-9)
	eventually(t, func() bool { return f.state(t, elsewhere.ID) == ratelimit.Cancelled })
}

// A client that only inserts gets no workers and no periodic jobs.
func TestInstallInAClientThatInserts(t *testing.T) {
	t.Parallel()
	limiter := ratelimittest.New(t, nil)
	s, err := scheduler.New(limiter, scheduler.Config{})
	require.NoError(t, err)
	config := &river.Config{}
	require.ErrorIs(t, s.Install(nil), scheduler.ErrInvalidConfig)
	require.ErrorIs(t, s.Install(config, nil), scheduler.ErrInvalidConfig)
	require.NoError(t, s.Install(config))
	require.Nil(t, config.Workers)
	require.Empty(t, config.PeriodicJobs)
	require.ErrorContains(t, s.Install(config), "call Install once")
	require.Len(t, config.Middleware, 1)
	working := func(workers *river.Workers) *river.Config {
		return &river.Config{Queues: map[string]river.QueueConfig{"q": {MaxWorkers: 1}}, Workers: workers}
	}
	workers := river.NewWorkers()
	require.NoError(t, s.Install(working(workers)))
	config = working(workers)
	require.ErrorIs(t, s.Install(config), scheduler.ErrInvalidConfig)
	require.Empty(t, config.Middleware, "it is as it was")
}

// TestSchemas promises that a limiter and River in schemas of their own use no others.
func TestSchemas(t *testing.T) {
	t.Parallel()
	f := setup(t)
	require.NoError(t, migrations.Up(t.Context(), f.pool, migrations.Config{Schema: "limits"}))
	require.NoError(t, scheduler.Migrate(t.Context(), f.pool, scheduler.MigrateConfig{Schema: "jobs"}))
	other := setupOn(t, f.pool, func(s *settings) { s.limiter.Schema, s.river.Schema = "limits", "jobs" })
	events := other.start(t, func(ctx context.Context, _ *river.Job[taskArgs]) error {
		return scheduler.TurnFromContext(ctx).Settle(ctx, daily.Global().Cost(10))
	})
	e := other.enqueue(t, nil, daily.Global().Cost(30))
	await(t, events, 1, river.EventKindJobCompleted)
	require.Equal(t, string(ratelimit.Settled), one[string](t, f.pool, "SELECT state FROM limits.reservations WHERE id = $1::uuid", e.ID))
	require.Contains(t, string(e.Job.Metadata), `"ratelimit:reservation:limits"`)
	require.Zero(t, f.jobs(t), "in the schema of the search_path")

	elsewhere := &scheduler.EnqueueOpts{InsertOpts: river.InsertOpts{Queue: "elsewhere"}}
	for _, each := range []*fixture{f, other} {
		e = each.enqueue(t, elsewhere, daily.Global().Cost(10))
		_, err := each.client.JobCancel(t.Context(), e.Job.ID)
		require.NoError(t, err)
	}
	done, err := other.scheduler.Maintain(t.Context(), other.client)
	require.NoError(t, err)
	require.Equal(t, 1, done.Ended)
	require.Equal(t, 1, f.open(t))
}

func TestMigrateIsSafeWhenSeveralCallIt(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
	var group errgroup.Group
	for range 4 {
		group.Go(func() error { return scheduler.Migrate(t.Context(), pool, scheduler.MigrateConfig{Schema: "jobs"}) })
	}
	require.NoError(t, group.Wait())
	require.Equal(t, 1, one[int](t, pool, "SELECT count(*) FROM pg_tables WHERE schemaname = 'jobs' AND tablename = 'river_job'"))
	require.ErrorIs(t, scheduler.Migrate(t.Context(), pool, scheduler.MigrateConfig{Schema: `a"; DROP`}), scheduler.ErrInvalidConfig)
	require.ErrorIs(t, scheduler.Migrate(t.Context(), nil, scheduler.MigrateConfig{}), scheduler.ErrInvalidConfig)
}

func TestNew(t *testing.T) {
	t.Parallel()
	limiter := ratelimittest.New(t, nil)
	for want, c := range map[string]struct {
		limiter *ratelimit.Limiter
		config  scheduler.Config
	}{
		"TakeUpEarly is 6s":          {limiter, scheduler.Config{TakeUpEarly: 6e9}},
		"2 is neither KeepEstimate":  {limiter, scheduler.Config{Cancelled: 2}},
		"-1 is neither KeepEstimate": {limiter, scheduler.Config{Discarded: -1}},
		"the limiter is nil":         {nil, scheduler.Config{}},
		"bound to a transaction":     {limiter.WithTx(nil), scheduler.Config{}},
	} {
		_, err := scheduler.New(c.limiter, c.config)
		require.ErrorIs(t, err, scheduler.ErrInvalidConfig, want)
		require.ErrorContains(t, err, want)
	}
}
