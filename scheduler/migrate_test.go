package scheduler_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
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

	t.Run("MayBeCalledByManyAtOnceAndAgain", func(t *testing.T) {
		t.Parallel()
		pool := postgrestest.New(t)
		var group errgroup.Group
		for range 4 {
			group.Go(func() error { return scheduler.Migrate(t.Context(), pool, scheduler.MigrateConfig{Schema: "jobs"}) })
		}
		require.NoError(t, group.Wait())
		require.NoError(t, scheduler.Migrate(t.Context(), pool, scheduler.MigrateConfig{Schema: "jobs"}))
		require.Equal(t, 1, one[int](t, pool, "SELECT count(*) FROM pg_tables WHERE schemaname = 'jobs' AND tablename = 'river_job'"))
	})

	t.Run("WorksOnAPoolOfOneConnection", func(t *testing.T) {
		t.Parallel()
		pool := postgrestest.New(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
		require.NoError(t, scheduler.Migrate(t.Context(), pool, scheduler.MigrateConfig{}))
	})

	t.Run("RefusesWhatIsNoSchema", func(t *testing.T) {
		t.Parallel()
		pool := postgrestest.New(t)
		require.ErrorIs(t, scheduler.Migrate(t.Context(), pool, scheduler.MigrateConfig{Schema: `a"; DROP`}), scheduler.ErrInvalidConfig)
		require.ErrorIs(t, scheduler.Migrate(t.Context(), nil, scheduler.MigrateConfig{}), scheduler.ErrInvalidConfig)
	})
}

func TestNew(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	limiter, err := ratelimit.New(pool, ratelimit.Config{})
	require.NoError(t, err)
	for name, config := range map[string]scheduler.Config{
		"LongTakeUp":  {TakeUpEarly: 6e9},
		"NoCancelled": {Cancelled: 2},
		"NoDiscarded": {Discarded: -1},
	} {
		t.Run("Refuses"+name, func(t *testing.T) {
			t.Parallel()
			_, err := scheduler.New(limiter, config)
			require.ErrorIs(t, err, scheduler.ErrInvalidConfig)
		})
	}
	for _, unusable := range []*ratelimit.Limiter{nil, limiter.WithTx(nil)} {
		_, err = scheduler.New(unusable, scheduler.Config{})
		require.ErrorIs(t, err, scheduler.ErrInvalidConfig)
		require.ErrorContains(t, err, "pass what ratelimit.New returned")
	}
}

func TestEnqueueSaysThatRiversTablesAreMissing(t *testing.T) {
	t.Parallel()
	f := setup(t)
	require.NoError(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), `DROP TABLE river_job CASCADE`)
		require.NoError(t, err)
		return nil
	}))
	_, err := f.tryEnqueue(t.Context(), nil, perSecond.Global())
	require.ErrorIs(t, err, scheduler.ErrNotMigrated)
}
