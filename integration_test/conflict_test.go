package integration_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// deadlocks closes pool, and returns how many deadlocks the server has found in its database.
func deadlocks(t *testing.T, pool *pgxpool.Pool) (found int) {
	t.Helper()
	require.NoError(t, lastSession(t, pool).QueryRow(t.Context(),
		`SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`).Scan(&found))
	return found
}

// The order of locking must not depend on which rows exist already. Another transaction holds the second row, and one caller and
// then the other queue for it, each with the rows it has locked by then.
func TestTakeLocksInOneOrderWhateverRowsExist(t *testing.T) {
	t.Parallel()
	b := setup(t)
	left, right := ratelimit.Define("left", hoard(1e4)), ratelimit.Define("right", hoard(1e4))
	readCommitted, serializable, standalone := callers()[0], callers()[2], callers()[3]
	for _, pair := range [][2]caller{
		{readCommitted, readCommitted},
		{serializable, serializable},
		{standalone, standalone},
		{standalone, readCommitted},
		{standalone, serializable},
		{readCommitted, standalone},
	} {
		for _, leftExists := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/%s/LeftExists=%v", pair[0].name, pair[1].name, leftExists), func(t *testing.T) { // not parallel: waiting counts all
				key := t.Name()
				require.NoError(t, b.limiter.Reset(t.Context(), right.For(key)))
				if leftExists {
					require.NoError(t, b.limiter.Reset(t.Context(), left.For(key)))
				}
				release := b.holdRow(t, right.Name(), key)
				done := make(chan error, 2)
				for i, c := range pair {
					process := b.with(t, ratelimit.Config{})
					go func() { done <- errOf(c.take(t.Context(), b.db(), process, left.For(key), right.For(key))) }()
					eventually(t, "the caller waits for a row", func() bool { return waiting(t, b.pool) == i+1 })
				}
				release()
				require.NoError(t, <-done)
				require.NoError(t, <-done)
				require.InDelta(t, 1e4-2, b.held(t, "left", key), 0.01)
				require.InDelta(t, 1e4-2, b.held(t, "right", key), 0.01)
			})
		}
	}
	require.Zero(t, deadlocks(t, b.pool))
}

// waiting returns how many sessions of the database wait for a lock.
func waiting(t *testing.T, pool *pgxpool.Pool) int {
	t.Helper()
	var n int
	require.NoError(t, pool.QueryRow(t.Context(),
		`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`).Scan(&n))
	return n
}

// A caller who loses a conflict inside a savepoint of its own gets the server's error once, and can continue from the savepoint.
// Earlier writes stay, and other buckets work, but the lost bucket fails for this snapshot.
func TestAConflictInASavepointIsTheCallers(t *testing.T) {
	t.Parallel()
	for level, iso := range map[string]pgx.TxIsoLevel{"RepeatableRead": pgx.RepeatableRead, "Serializable": pgx.Serializable} {
		for verb, call := range map[string]verb{
			"Take":          taking(calls.For("lost")),
			"TakeSeveral":   taking(calls.For("lost"), roomy.For("lost")),
			"TakeFromShard": taking(shardedCalls.For("lost").Cost(callsCapacity/8+1), calls.For("lost")),
			"Reserve":       reserving(calls.For("lost")),
		} {
			t.Run(level+"/"+verb, func(t *testing.T) {
				t.Parallel()
				w := &wire{}
				s, ctx := newStand(t, w.onEach), t.Context()
				require.NoError(t, s.takeOutside(ctx, "lost"))
				takeOne(t, s.outside.limiter, shardedCalls.For("lost"))
				tx := s.begin(t, iso)
				require.NoError(t, s.send(ctx, tx, "kept"))
				require.NoError(t, s.takeOutside(ctx, "lost")) // after the snapshot
				takeOne(t, s.outside.limiter, shardedCalls.For("lost").Cost(callsCapacity/2))
				for range 2 {
					savepoint, err := tx.Begin(ctx)
					require.NoError(t, err)
					require.NoError(t, s.send(ctx, savepoint, "undone"))
					before := w.Trips()
					allowed, err := call(ctx, s.limiter.WithTx(savepoint))
					require.False(t, allowed)
					require.Equal(t, "40001", sqlstate(err))
					require.True(t, ratelimit.IsRetryable(err))
					require.NotErrorIs(t, err, ratelimit.ErrContended, "nothing was tried again")
					require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown)
					require.LessOrEqual(t, w.Trips()-before, int64(4), "it was asked for once")
					_, err = savepoint.Exec(ctx, `SELECT 1`)
					require.Equal(t, "25P02", sqlstate(err), "the savepoint is spoilt, as after any error")
					require.NoError(t, savepoint.Rollback(ctx))
				}
				require.NoError(t, s.send(ctx, tx, "after"))
				require.NoError(t, tx.Commit(ctx))
				s.requireTakenFrom(t, map[string]int{"kept": 1, "after": 1, "undone": 0, "lost": 2})
				require.Equal(t, 2, s.messages(t))
				require.Zero(t, s.outside.count(t, `SELECT count(*) FROM ratelimit.reservations`))
				s.requireHealthy(t)
			})
		}
	}
}

// requireTakenFrom checks how many tokens of calls are missing from the bucket of each key.
func (s *stand) requireTakenFrom(t *testing.T, taken map[string]int) {
	t.Helper()
	for key, want := range taken {
		require.Equal(t, want, s.outside.count(t, `SELECT coalesce(round(sum($1 - value)), 0)::integer FROM ratelimit.buckets
			WHERE name = 'calls' AND key = $2`, callsCapacity, key), key)
	}
}

// Every commit of one takes the row from all that run beside it, and each transaction lasts as long as a
// short round of an application does.
func TestInTxGetsAllOfManyWorkersThroughOnOneKey(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "hundreds of transactions, each of which waits")
	const workers, each = 32, 20
	s := newStand(t, func(config *pgxpool.Config) { config.MaxConns = workers })
	ctx := t.Context()
	var attempts, most atomic.Int64
	start := time.Now()
	require.NoError(t, atonce.Do(workers, func(worker int) error {
		for n := range each {
			runs := int64(0)
			err := s.limiter.InTx(ctx, func(tx pgx.Tx) error {
				runs++
				if err := s.send(ctx, tx, "ada"); err != nil {
					return err
				}
				_, err := tx.Exec(ctx, `SELECT pg_sleep(0.005)`)
				return err
			})
			if err != nil {
				return fmt.Errorf("worker %d, transaction %d: %w", worker, n, err)
			}
			attempts.Add(runs)
			for seen := most.Load(); runs > seen && !most.CompareAndSwap(seen, runs); seen = most.Load() {
			}
		}
		return nil
	}))
	took := time.Since(start)
	const commits = workers * each
	perCommit := float64(attempts.Load()) / commits
	t.Logf("%d workers, %d commits of a 5 ms transaction on one key in %v: %.2f attempts per commit, at most %d",
		workers, commits, took.Round(time.Millisecond), perCommit, most.Load())
	require.Less(t, perCommit, 2.0, "without the queue of the process it takes more")
	s.requireSent(t, commits)
	s.requireHealthy(t)
}
