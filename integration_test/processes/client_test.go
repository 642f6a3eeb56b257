package processes_test

import (
	"context"
	"math"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

var calls = ratelimit.Define("calls", world.Hoard(callsCapacity))

const callsCapacity = 1000

// client is a process to kill. Its arguments are the call that it waits in, and the client_connection_check_interval of its session.
func client(t *testing.T, url string, arguments []string) {
	t.Helper()
	w := world.Open(t, url, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["client_connection_check_interval"] = arguments[1] })
	var err error
	switch arguments[0] {
	case "InTx":
		err = send(t.Context(), w.Limiter, "ada")
	case "Take":
		_, err = w.Limiter.Take(t.Context(), calls.For("ada"))
	}
	t.Fatalf("was not killed: %v", err)
}

// send takes a token and writes a message in one transaction, as an application does.
func send(ctx context.Context, limiter *ratelimit.Limiter, key string) error {
	return limiter.InTx(ctx, func(tx pgx.Tx) error {
		if err := limiter.WithTx(tx).Require(ctx, calls.For(key)); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `INSERT INTO public.messages (key) VALUES ($1)`, key)
		return err
	})
}

// A client that is killed leaves its backend waiting. The server runs its statement once the lock is free, unless a COMMIT is
// missing, or the server checks its client connections meanwhile.
func TestAClientThatIsKilledWhileItWaits(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "a process for each row")
	const unwatched, watched = "0", "50ms"
	for _, test := range []struct {
		name, call, check string
		takes             int // at most
	}{
		{name: "InTxTakesNothing", call: "InTx", check: unwatched},
		{name: "InTxTakesNothingAndLeavesWhenWatched", call: "InTx", check: watched},
		{name: "TakeTakesOnceAtMost", call: "Take", check: unwatched, takes: 1},
		{name: "TakeTakesNothingAndLeavesWhenWatched", call: "Take", check: watched},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			ctx, w := t.Context(), world.New(t)
			w.Exec(t, `CREATE TABLE public.messages (key text NOT NULL)`)
			require.NoError(t, w.Limiter.Require(ctx, calls.For("ada")))
			blocker := w.Begin(t, pgx.ReadCommitted)
			_, err := blocker.Exec(ctx, `SELECT FROM ratelimit.buckets WHERE key = 'ada' FOR UPDATE`)
			require.NoError(t, err)
			p := start(t, "client", w.URL(), test.call, test.check)
			const waits = `FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
				AND query_start <= clock_timestamp() - interval '20 ms'`
			world.Eventually(t, "it waits for the lock", func() bool { return w.Count(t, `SELECT count(*) `+waits) == 1 })
			backend := w.Count(t, `SELECT pid `+waits)
			awaitEnd := func() {
				world.Eventually(t, "the backend ends", func() bool {
					return w.Count(t, `SELECT count(*) FROM pg_stat_activity WHERE pid = $1`, backend) == 0
				})
			}
			require.True(t, p.Kill(), p.Output())
			if test.check == watched {
				awaitEnd() // while the row is still locked
			}
			require.NoError(t, blocker.Rollback(ctx))
			awaitEnd()
			taken := int(math.Round(callsCapacity - w.Held(t, "calls", "ada"))) // without the fraction that arrived meanwhile
			require.GreaterOrEqual(t, taken, 1)
			require.LessOrEqual(t, taken, 1+test.takes)
			require.Zero(t, w.Count(t, `SELECT count(*) FROM public.messages`))

			require.NoError(t, send(ctx, w.Limiter, "the next caller"))
			require.Equal(t, 1, w.Count(t, `SELECT count(*) FROM public.messages`))
			require.Zero(t, w.Count(t, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'`))
			require.Zero(t, w.Pool.Stat().AcquiredConns())
		})
	}
}

// hot is a bucket whose transactions take turns among processes.
var hot = ratelimit.Define("hot", world.Hoard(callsCapacity)).Global()

// takeInTurn takes a token in a transaction that queues for it from its beginning.
func takeInTurn(ctx context.Context, l *ratelimit.Limiter, then func()) error {
	return l.InTx(ratelimit.WithQueue(ctx, hot), func(tx pgx.Tx) error {
		err := l.WithTx(tx).Require(ctx, hot)
		then()
		return err
	})
}

// sharedTurn is a process that has its turn until it is killed.
func sharedTurn(t *testing.T, url string, _ []string) {
	t.Helper()
	limiter := world.Open(t, url).With(t, ratelimit.Config{SharedQueues: true})
	require.NoError(t, takeInTurn(t.Context(), limiter, func() { select {} }))
}

// A process that is killed while it has its turn takes nothing, and leaves its turn to the next.
func TestAProcessThatIsKilledInItsSharedTurn(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "a process")
	w := world.New(t)
	limiter := w.With(t, ratelimit.Config{SharedQueues: true})
	turns := func() int {
		return w.Count(t, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted
			AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`)
	}
	holder := start(t, "sharedTurn", w.URL())
	world.Eventually(t, "it has its turn", func() bool { return turns() == 1 })
	done := make(chan error, 1)
	go func() { done <- takeInTurn(t.Context(), limiter, func() {}) }()
	require.True(t, holder.Kill(), holder.Output())
	require.NoError(t, <-done)
	require.InDelta(t, callsCapacity-1, w.Held(t, "hot", ""), 0.01)
	world.Eventually(t, "no lock is held", func() bool { return turns() == 0 })
}
