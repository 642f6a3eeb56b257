package integration_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The environment of TestSharedQueueProcess.
const (
	sharedQueueURL    = "RATELIMIT_TEST_SHARED_URL"    // makes it a process that takes
	sharedQueueRounds = "RATELIMIT_TEST_SHARED_ROUNDS" // how often each worker does; 0: once, and for ever
)

const sharedQueueWorkers = 4

// sharedHot is what these processes want.
var sharedHot = ratelimit.Define("hot", hoard(100_000)).Global()

// takeShared takes one token in a transaction that queues for it, from the beginning where it names it.
func takeShared(ctx context.Context, l *ratelimit.Limiter, named bool, then func() error) error {
	if named {
		ctx = ratelimit.WithQueue(ctx, sharedHot)
	}
	return l.InTx(ctx, func(tx pgx.Tx) error {
		if _, err := l.WithTx(tx).Take(ctx, sharedHot); err != nil {
			return err
		}
		return then()
	})
}

// TestSharedQueueProcess is not a test but one of the processes of others. It writes how many attempts it made.
func TestSharedQueueProcess(t *testing.T) { //nolint:paralleltest // alone in its process
	url := os.Getenv(sharedQueueURL)
	if url == "" {
		t.Skip("a process of other tests")
	}
	rounds, err := strconv.Atoi(os.Getenv(sharedQueueRounds))
	require.NoError(t, err)
	pool, err := pgxpool.New(t.Context(), url)
	require.NoError(t, err)
	defer pool.Close()
	b := &bundle{pool: pool, schema: "ratelimit"}
	limiter := b.with(t, ratelimit.Config{SharedQueues: true})
	if rounds == 0 {
		require.NoError(t, takeShared(t.Context(), limiter, true, func() error { select {} }))
	}
	var attempts atomic.Int64
	require.NoError(t, atonce.Do(sharedQueueWorkers, func(worker int) error {
		for range rounds {
			err := takeShared(t.Context(), limiter, worker%2 == 0, func() error {
				attempts.Add(1)
				return nil
			})
			if err != nil {
				return err
			}
		}
		return nil
	}))
	_, _ = fmt.Println("attempts", attempts.Load())
}

func sharedQueueProcess(t *testing.T, url string, rounds int) *exec.Cmd {
	t.Helper()
	program := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestSharedQueueProcess$")
	program.Env = append(os.Environ(), sharedQueueURL+"="+url, fmt.Sprintf("%s=%d", sharedQueueRounds, rounds))
	return program
}

// turns returns how many sessions hold an advisory lock in the database of the test.
func (b *bundle) turns(t *testing.T) (held int) {
	t.Helper()
	require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`).Scan(&held))
	return held
}

// Transactions of many processes that want one bucket take turns, directly and through a pooler that gives a session to
// another client after each transaction: all that was taken is in the bucket, and no lock is left anywhere.
func TestSharedQueuesOfManyProcesses(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "processes of their own")
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
			b := setup(t)
			url := through(t, b.pool.Config().ConnString())
			var attempts atomic.Int64
			require.NoError(t, atonce.Do(processes, func(int) error {
				out, err := sharedQueueProcess(t, url, rounds).CombinedOutput()
				if err != nil {
					return fmt.Errorf("%w\n%s", err, out)
				}
				_, rest, _ := strings.Cut(string(out), "attempts ")
				n, err := strconv.Atoi(strings.Fields(rest)[0])
				attempts.Add(int64(n))
				return err
			}))
			const commits = processes * sharedQueueWorkers * rounds
			require.InDelta(t, 100_000-commits, b.held(t, "hot", ""), 0.01)
			t.Logf("%.3f attempts that took a commit", float64(attempts.Load())/commits)
			require.Zero(t, b.turns(t))
		})
	}
}

// A process that is killed while it has its turn takes nothing, and leaves its turn to the next.
func TestAProcessThatIsKilledInItsSharedTurn(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limiter := b.with(t, ratelimit.Config{SharedQueues: true})
	holder := sharedQueueProcess(t, b.pool.Config().ConnString(), 0)
	require.NoError(t, holder.Start())
	eventually(t, "it has its turn", func() bool { return b.turns(t) == 1 })
	done := make(chan error, 1)
	go func() { done <- takeShared(t.Context(), limiter, true, func() error { return nil }) }()
	require.NoError(t, holder.Process.Kill())
	require.Error(t, holder.Wait())
	require.NoError(t, <-done)
	require.InDelta(t, 100_000-1, b.held(t, "hot", ""), 0.01)
	eventually(t, "no lock is held", func() bool { return b.turns(t) == 0 })
}

// A connection that breaks while its transaction waits or has its turn is another attempt, and one that breaks at COMMIT is not.
func TestASharedTurnOnAConnectionThatBreaks(t *testing.T) {
	t.Parallel()
	for request, want := range map[string]error{
		"pg_try_advisory_lock": nil, "bucket": nil, "commit": ratelimit.ErrCommitUnknown,
	} {
		for _, side := range []cut{cutRequest, cutAnswer} {
			for _, named := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s %d %t", request, side, named), func(t *testing.T) {
					t.Parallel()
					cutter := &cutter{}
					b := setup(t, cutter.on, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec })
					b.limiter = b.with(t, ratelimit.Config{SharedQueues: true})
					take := func(named bool) error {
						return takeShared(t.Context(), b.limiter, named, func() error { return nil })
					}
					require.NoError(t, take(true))
					cutter.arm(request, side, 1)
					require.ErrorIs(t, take(named), want)
					cutter.arm("", 0, 0)
					eventually(t, "no lock is held", func() bool { return b.turns(t) == 0 })
					require.NoError(t, take(named))
					taken := 3.0
					if want != nil && side == cutRequest {
						taken--
					}
					require.InDelta(t, 100_000-taken, b.held(t, "hot", ""), 0.01)
				})
			}
		}
	}
}
