package scheduler_test

import (
	"context"
	"log/slog"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

// installed returns a client that was configured by Install alone, and works tasks.
func installed(t *testing.T, f *fixture, config *river.Config, holders ...*scheduler.Holder) *river.Client[pgx.Tx] {
	t.Helper()
	config.Logger, config.TestOnly = slog.New(slog.DiscardHandler), true
	require.NoError(t, f.scheduler.Install(config, holders...))
	client, err := river.NewClient(riverpgxv5.New(f.pool), config)
	require.NoError(t, err)
	return client
}

// TestInstall promises that Install is all a River client needs. A client that works jobs guards their turns and calls Maintain; a
// client that only inserts gets no workers and no periodic jobs.
func TestInstall(t *testing.T) {
	t.Parallel()

	t.Run("InAClientThatWorks", func(t *testing.T) {
		t.Parallel()
		f := setup(t, stopped)
		holder, err := scheduler.NewHolder(f.limiter, scheduler.HolderConfig{
			Requests: func(*rivertype.JobRow) ([]ratelimit.Request, error) { return nil, nil },
		})
		require.NoError(t, err)
		workers := river.NewWorkers()
		river.AddWorker(workers, river.WorkFunc(func(ctx context.Context, _ *river.Job[taskArgs]) error {
			return scheduler.TurnFromContext(ctx).Settle(ctx)
		}))
		f.client = installed(t, f, &river.Config{
			Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 10}}, Workers: workers,
		}, holder)
		// No client works the queue of this job: it ends outside of the middleware, and Maintain finds it.
		later := f.enqueue(t, &scheduler.EnqueueOpts{InsertOpts: river.InsertOpts{Queue: "elsewhere"}}, perSecond.Global())
		_, err = f.client.JobCancel(t.Context(), later.Job.ID)
		require.NoError(t, err)
		e := f.enqueue(t, nil, perSecond.Global())
		f.start(t, nil)
		eventually(t, func() bool { return f.state(t, e.ID) == ratelimit.Settled })
		eventually(t, func() bool { return f.state(t, later.ID) == ratelimit.Cancelled })
	})

	t.Run("InAClientThatInserts", func(t *testing.T) {
		t.Parallel()
		f := setup(t, stopped)
		config := &river.Config{}
		f.client = installed(t, f, config)
		require.Nil(t, config.Workers)
		require.Empty(t, config.PeriodicJobs)
		require.NotNil(t, f.enqueue(t, nil, perSecond.Global()).Job)
	})

	t.Run("Refuses", func(t *testing.T) {
		t.Parallel()
		f := setup(t, stopped)
		require.ErrorIs(t, f.scheduler.Install(nil), scheduler.ErrInvalidConfig)
		require.ErrorIs(t, f.scheduler.Install(&river.Config{}, nil), scheduler.ErrInvalidConfig)
		config := &river.Config{}
		require.NoError(t, f.scheduler.Install(config))
		require.ErrorContains(t, f.scheduler.Install(config), "call Install once")
		require.Len(t, config.Middleware, 1)
		workers := river.NewWorkers()
		require.NoError(t, f.scheduler.Install(&river.Config{Queues: map[string]river.QueueConfig{"q": {MaxWorkers: 1}}, Workers: workers}))
		config = &river.Config{Queues: map[string]river.QueueConfig{"q": {MaxWorkers: 1}}, Workers: workers}
		require.ErrorIs(t, f.scheduler.Install(config), scheduler.ErrInvalidConfig)
		require.Empty(t, config.Middleware, "it is as it was")
	})
}
