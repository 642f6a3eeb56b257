package processes_test

import (
	"context"
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const sharedQueueWorkers = 4

// sharedHot is what these processes want.
var sharedHot = ratelimit.Define("hot", world.Hoard(100_000)).Global()

// takeShared takes one token in a transaction that queues for it, from the beginning where it names it.
func takeShared(ctx context.Context, l *ratelimit.Limiter, named bool, then func()) error {
	if named {
		ctx = ratelimit.WithQueue(ctx, sharedHot)
	}
	return l.InTx(ctx, func(tx pgx.Tx) error {
		_, err := l.WithTx(tx).Take(ctx, sharedHot)
		then()
		return err
	})
}

// sharedQueue is a process whose workers take. Its argument is how often each worker does; 0 takes once, and never ends.
func sharedQueue(t *testing.T, url string, arguments []string) {
	t.Helper()
	rounds, err := strconv.Atoi(arguments[0])
	require.NoError(t, err)
	limiter := world.Open(t, url).With(t, ratelimit.Config{SharedQueues: true})
	if rounds == 0 {
		require.NoError(t, takeShared(t.Context(), limiter, true, func() { select {} }))
	}
	require.NoError(t, atonce.Do(sharedQueueWorkers, func(worker int) error {
		for range rounds {
			if err := takeShared(t.Context(), limiter, worker%2 == 0, func() {}); err != nil {
				return err
			}
		}
		return nil
	}))
}

// turns returns how many sessions hold an advisory lock in the database of the test.
func turns(t *testing.T, w *world.World) int {
	t.Helper()
	return w.Count(t, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`)
}

// Transactions of many processes on one bucket take turns, directly and through a pooler that gives a session to another client
// after each transaction. The bucket has all takes, and no lock is left.
func TestSharedQueuesOfManyProcesses(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "eight processes")
	for name, through := range map[string]func(t *testing.T, url string) string{
		"direct": func(_ *testing.T, url string) string { return url },
		"PgBouncer": func(t *testing.T, url string) string {
			t.Helper()
			return postgrestest.StartPgBouncer(t, url, postgrestest.TransactionPool) + "&default_query_exec_mode=exec"
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const processes, rounds = 8, 10
			w := world.New(t)
			url := through(t, w.URL())
			require.NoError(t, atonce.Do(processes, func(int) error { return start(t, "sharedQueue", url, strconv.Itoa(rounds)).End() }))
			const commits = processes * sharedQueueWorkers * rounds
			require.InDelta(t, 100_000-commits, w.Held(t, "hot", ""), 0.01)
			require.Zero(t, turns(t, w))
		})
	}
}

// A process that is killed while it has its turn takes nothing, and leaves its turn to the next.
func TestAProcessThatIsKilledInItsSharedTurn(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "a process")
	w := world.New(t)
	limiter := w.With(t, ratelimit.Config{SharedQueues: true})
	holder := start(t, "sharedQueue", w.URL(), "0")
	world.Eventually(t, "it has its turn", func() bool { return turns(t, w) == 1 })
	done := make(chan error, 1)
	go func() { done <- takeShared(t.Context(), limiter, true, func() {}) }()
	require.True(t, holder.Kill(), holder.Output())
	require.NoError(t, <-done)
	require.InDelta(t, 100_000-1, w.Held(t, "hot", ""), 0.01)
	world.Eventually(t, "no lock is held", func() bool { return turns(t, w) == 0 })
}
