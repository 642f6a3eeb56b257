package pooler_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
	"github.com/pgratelimit/pgratelimit/scheduler"
)

// turns returns how many sessions have a turn, or wait for one.
func (d *database) turns(t *testing.T, granted bool) int {
	t.Helper()
	return d.Count(t, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted = $1
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`, granted)
}

// Turns among processes are session locks for a moment, but work through a pooler in transaction mode. The next
// transaction waits in the server, and a client that disconnects while waiting leaves no lock behind. Two Limiters are
// two processes here. TestAWaitForASharedTurnIsBounded of ratelimit has a wait that is too long.
func TestSharedTurnsThroughPgBouncer(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "PgBouncers of its own")
	for _, how := range atOnce {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			d := setup(t)
			url := mode(d.behind(t, postgrestest.TransactionPool), how)
			request := roomy.For("hot")
			// inTurn runs fn in a transaction of another process that has its turn, and then takes.
			inTurn := func(ctx context.Context, fn func() error) chan error {
				l, done := limiterOn(t, connect(t, url, 2), ratelimit.Config{}), make(chan error, 1)
				go func() { done <- world.InTurn(ctx, l, request, fn) }()
				return done
			}
			nothing := func() error { return nil }
			for _, goesAway := range []bool{false, true} {
				has, letGo := make(chan struct{}), make(chan error)
				first := inTurn(t.Context(), func() error { close(has); return <-letGo })
				<-has
				require.Equal(t, 1, d.turns(t, true))
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				second := inTurn(ctx, nothing)
				world.Eventually(t, "the second waits", func() bool { return d.turns(t, false) == 1 || len(second) == 1 })
				if goesAway {
					cancel()
					if err := <-second; err != nil { // else its second was over
						require.ErrorIs(t, err, context.Canceled)
					}
				}
				letGo <- nil
				require.NoError(t, <-first)
				if !goesAway {
					require.NoError(t, <-second, "it has its turn when the first has ended")
				}
				world.Eventually(t, "no turn is left behind", func() bool { return d.turns(t, true) == 0 })
			}
			require.NoError(t, <-inTurn(t.Context(), nothing))
			require.Zero(t, d.turns(t, true))
		})
	}
}

// pooledArgs are jobs.
type pooledArgs struct{}

func (pooledArgs) Kind() string { return "pooled" }

// Jobs are enqueued with their reservations by many at once, and start with them, where River polls.
func TestJobsThroughPgBouncer(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "PgBouncers of its own")
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
			var ran atomic.Int64
			workers := river.NewWorkers()
			river.AddWorker(workers, river.WorkFunc(func(context.Context, *river.Job[pooledArgs]) error { ran.Add(1); return nil }))
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
					e, err := sched.Enqueue(t.Context(), client, tx, pooledArgs{},
						&river.InsertOpts{Queue: how}, roomy.For(how))
					reservations[worker] = e.ID
					return err
				})
			}))
			world.Eventually(t, "as many jobs have run", func() bool { return ran.Load() >= callers })
			require.EqualValues(t, callers, ran.Load())
			for _, id := range reservations {
				started, err := limiter.Started(t.Context(), id)
				require.NoError(t, err)
				require.True(t, started)
			}
			require.NoError(t, holds(t.Context(), limiter, how, 1e6-callers))
		})
	}
}

// Rules are changed through the pooler, and Sets learn it by polling, also a Set that tries to LISTEN, which does not
// work there.
func TestRulesThroughPgBouncer(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "PgBouncers of its own")
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
				require.NoError(t, <-ended)
			}
		})
	}
}
