// Package processes_test holds tests of several programs on one database, and of processes that are killed.
package processes_test

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/child"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// No test leaves a goroutine behind, also after faults.
func TestMain(m *testing.M) { testkit.Main(m) }

// role is the purpose of a process: the function of that name in roles, on the database at URL.
type role struct {
	Name, URL string
	Arguments []string
}

var roles = map[string]func(t *testing.T, url string, arguments []string){
	"client": client, "manyKeys": manyKeys, "sharedTurn": sharedTurn, "waiting": waiting,
}

// TestRole is not a test but the body of the processes that the other tests start.
func TestRole(t *testing.T) { //nolint:paralleltest // alone in its process
	var r role
	isChild, err := child.Role(&r)
	require.NoError(t, err)
	if !isChild {
		t.Skip("a process of other tests")
	}
	roles[r.Name](t, r.URL, r.Arguments)
}

// start starts a process, which is killed at the end of the test.
func start(t *testing.T, name, url string, arguments ...string) *child.Process {
	t.Helper()
	p, err := child.Start(role{name, url, arguments}, func([]byte) bool { return false })
	require.NoError(t, err)
	t.Cleanup(func() { p.Kill() })
	return p
}

var calls = ratelimit.Define("calls", world.Hoard(callsCapacity))

const callsCapacity = 1000

// client is a process to kill. Its arguments are the call that it waits in, and the client_connection_check_interval of
// its session.
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

// A client that is killed leaves its backend waiting. The server runs its statement once the lock is free, unless a
// COMMIT is missing, or the server checks its client connections meanwhile.
func TestAClientThatIsKilledWhileItWaits(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "a process for each row")
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

// sharedTurn is a process that has its turn until it is killed.
func sharedTurn(t *testing.T, url string, _ []string) {
	t.Helper()
	require.NoError(t, world.InTurn(t.Context(), world.Open(t, url).Limiter, hot, func() error { select {} }))
}

// A process that is killed while it has its turn takes nothing, and leaves its turn to the next.
func TestAProcessThatIsKilledInItsSharedTurn(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "a process")
	w := world.New(t)
	turns := func() int {
		return w.Count(t, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted
			AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`)
	}
	holder := start(t, "sharedTurn", w.URL())
	world.Eventually(t, "it has its turn", func() bool { return turns() == 1 })
	done := make(chan error, 1)
	go func() { done <- world.InTurn(t.Context(), w.Limiter, hot, func() error { return nil }) }()
	require.True(t, holder.Kill(), holder.Output())
	require.NoError(t, <-done)
	require.InDelta(t, callsCapacity-1, w.Held(t, "hot", ""), 0.01)
	world.Eventually(t, "no lock is held", func() bool { return turns() == 0 })
}

// manyKeys is a process, so that its heap is its own: 5,000 keys leave it as it was after 500.
func manyKeys(t *testing.T, url string, _ []string) {
	t.Helper()
	w := world.Open(t, url)
	limiter := w.With(t, ratelimit.Config{RefusalCache: 512})
	limit := ratelimit.Define("account", world.Hoard(1))
	heap := func() uint64 {
		runtime.GC()
		runtime.GC() // what a sync.Pool held is gone after the second
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	come := func(name string, keys int) {
		require.NoError(t, atonce.Do(64, func(caller int) error {
			for i := caller; i < 2*keys; i += 64 { // each key twice: it is allowed, and then refused
				if _, err := limiter.Take(t.Context(), limit.For(fmt.Sprintf("%s %08d of an attacker", name, i%keys))); err != nil {
					return err
				}
			}
			return nil
		}))
	}
	come("warm", 500)
	before := heap()
	come("more", 5000)
	require.Less(t, int(heap())-int(before), 1<<20, "the heap grows with the keys")
	require.NoError(t, limiter.Close(t.Context()))
}

// A process remembers no more keys than Config.RefusalCache says.
func TestTheHeapDoesNotGrowWithTheKeys(t *testing.T) {
	t.Parallel()
	testkit.Nightly(t, "the size of a heap depends on the machine")
	require.NoError(t, start(t, "manyKeys", world.New(t).URL()).End())
}
