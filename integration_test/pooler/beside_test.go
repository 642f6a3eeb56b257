package pooler_test

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

// pooledArgs are jobs.
type pooledArgs struct {
	ID string `json:"id"` // of the caller that enqueued it
}

func (pooledArgs) Kind() string { return "pooled" }

// Jobs are enqueued with their reservations by many at once, and start with them, where River polls.
func TestJobsThroughPgBouncer(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "PgBouncers of its own")
	d := setup(t)
	require.NoError(t, scheduler.Migrate(t.Context(), d.Pool, scheduler.MigrateConfig{}))
	url := d.behind(t, postgrestest.TransactionPool)
	for _, how := range atOnce {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			pool := connect(t, mode(url, how), callers)
			limiter := limiterOn(t, pool, ratelimit.Config{})
			sched, err := scheduler.New(limiter, scheduler.Config{Logger: slog.New(slog.DiscardHandler)})
			require.NoError(t, err)
			ran := make(chan string, 2*callers)
			workers := river.NewWorkers()
			river.AddWorker(workers, river.WorkFunc(func(_ context.Context, job *river.Job[pooledArgs]) error {
				ran <- job.Args.ID
				return nil
			}))
			config := &river.Config{
				FetchCooldown: 5 * time.Millisecond, FetchPollInterval: 20 * time.Millisecond, PollOnly: true, TestOnly: true,
				Logger: slog.New(slog.DiscardHandler), Queues: map[string]river.QueueConfig{how: {MaxWorkers: callers}}, Workers: workers,
			}
			require.NoError(t, sched.Install(config))
			client, err := river.NewClient(riverpgxv5.New(pool), config)
			require.NoError(t, err)
			require.NoError(t, client.Start(context.WithoutCancel(t.Context())))
			t.Cleanup(func() { require.NoError(t, client.StopAndCancel(context.WithoutCancel(t.Context()))) })
			reservations := make([]string, callers)
			require.NoError(t, atonce.Do(callers, func(worker int) error {
				return limiter.InTx(t.Context(), func(tx pgx.Tx) error {
					e, err := sched.Enqueue(t.Context(), client, tx, pooledArgs{fmt.Sprint(worker)},
						&scheduler.EnqueueOpts{InsertOpts: river.InsertOpts{Queue: how}}, roomy.For(how))
					reservations[worker] = e.ID
					return err
				})
			}))
			done := make(map[string]bool)
			for range callers {
				select {
				case id := <-ran:
					require.False(t, done[id], "it ran twice")
					done[id] = true
				case <-time.After(world.Patient):
					require.FailNow(t, "jobs did not run", "only %d", len(done))
				}
			}
			for _, id := range reservations {
				started, err := limiter.Started(t.Context(), id)
				require.NoError(t, err)
				require.True(t, started)
			}
			require.NoError(t, holds(t.Context(), limiter, how, 1e6-callers))
		})
	}
}

// Rules are changed through the pooler, and Sets learn it by polling, also a Set that tries to LISTEN, which does not work there.
func TestRulesThroughPgBouncer(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "PgBouncers of its own")
	d := setup(t)
	url := d.behind(t, postgrestest.TransactionPool)
	for _, how := range atOnce {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			pool := connect(t, mode(url, how), callers)
			store, err := rules.NewStore(pool, rules.StoreConfig{Lead: -1})
			require.NoError(t, err)
			limit := ratelimit.Define("of_"+how, world.Hoard(1))
			for _, noListen := range []bool{true, false} {
				set, err := rules.NewSet(pool, rules.Config{Poll: 20 * time.Millisecond, NoListen: noListen, Limits: []ratelimit.Limit{limit}})
				require.NoError(t, err)
				ctx, stop := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				go func() { ended <- set.Run(ctx) }()
				limiter := limiterOn(t, pool, ratelimit.Config{Policies: set})
				for _, rate := range []float64{10, 20} {
					applied, err := store.Put(t.Context(), rules.Edit{Author: "test", Reason: "test"},
						rules.Rule{Limit: limit.Name(), Policy: ratelimit.TokenBucket{Rate: rate, Period: world.Century}})
					require.NoError(t, err)
					world.Eventually(t, "the change is heard of", func() bool { return set.Version() >= applied.Version })
					d, err := limiter.Check(t.Context(), limit.For(fmt.Sprint(noListen, rate)).Cost(rate))
					require.NoError(t, err)
					require.True(t, d.Allowed)
				}
				stop()
				require.ErrorIs(t, <-ended, context.Canceled)
			}
		})
	}
}
