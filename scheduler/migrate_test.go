package scheduler_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

// otherSchema returns a fixture on the database of f whose limiter and River have schemas of their own.
func otherSchema(t *testing.T, f *fixture) *fixture {
	t.Helper()
	require.NoError(t, migrations.Up(t.Context(), f.pool, migrations.Config{Schema: "limits"}))
	require.NoError(t, scheduler.Migrate(t.Context(), f.pool, scheduler.MigrateConfig{Schema: "jobs"}))
	return setupOn(t, f.pool, func(s *settings) { s.limiter.Schema, s.river.Schema = "limits", "jobs" })
}

func TestMigrate(t *testing.T) {
	t.Parallel()

	t.Run("MakesAQueueInASchemaOfItsOwn", func(t *testing.T) {
		t.Parallel()
		f := otherSchema(t, setup(t))
		events := f.start(t, func(ctx context.Context, _ *river.Job[taskArgs]) error {
			return scheduler.TurnFromContext(ctx).Settle(ctx, daily.Global().Cost(10))
		})
		e := f.enqueue(t, nil, daily.Global().Cost(30))
		await(t, events, 1, river.EventKindJobCompleted)
		require.Equal(t, string(ratelimit.Settled), one[string](t, f.pool, "SELECT state FROM limits.reservations WHERE id = $1::uuid", e.ID))
		require.Contains(t, string(e.Job.Metadata), `"ratelimit:reservation:limits"`)
		require.Zero(t, f.jobs(t)) // nothing went to the schema of the search_path
		_, err := f.scheduler.Maintain(t.Context(), f.client)
		require.NoError(t, err)
	})

	t.Run("MayBeCalledByManyAtOnce", func(t *testing.T) {
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
	})
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

func TestEnqueueSaysThatRiversTablesAreMissing(t *testing.T) {
	t.Parallel()
	f := setup(t)
	_, err := f.pool.Exec(t.Context(), `DROP TABLE river_job CASCADE`)
	require.NoError(t, err)
	_, err = f.tryEnqueue(t.Context(), nil, perSecond.Global())
	require.ErrorIs(t, err, scheduler.ErrNotMigrated)
}
