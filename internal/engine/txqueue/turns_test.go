package txqueue

import (
	"fmt"
	"hash/fnv"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
)

// A process has queues only for buckets that are contended now, and needs memory only for these.
func TestQueuesAreBoundedAndForgotten(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	q := New("")
	q.Now, q.limit = func() time.Time { return now }, 3
	names := func(first, n int) (keys []bucket.Key) {
		for i := range n {
			keys = append(keys, bucket.Key{Name: "limit", Key: strconv.Itoa(first + i)})
		}
		return keys
	}
	require.Nil(t, q.join(names(0, 1)[0]), "nobody has met there")

	q.Conflict(false, names(0, 10)...)
	require.Len(t, q.of, 3)
	held := q.join(names(0, 1)[0])
	require.NotNil(t, held)
	require.True(t, held.wait(t.Context(), 0))
	require.False(t, held.wait(t.Context(), 0), "one at a time")

	now = now.Add(queueMemory + 1)
	require.Nil(t, q.join(names(1, 1)[0]), "it was a while ago")
	q.Conflict(false, names(20, 10)...)
	require.Len(t, q.of, 3)
	require.Same(t, held, q.of[names(0, 1)[0]], "somebody is in it")
	q.leave(held, true)

	now = now.Add(queueMemory + 1)
	q.Conflict(false, names(40, 3)...)
	require.Len(t, q.of, 3)
	require.Nil(t, q.join(names(0, 1)[0]))
}

// Transactions wait for those of other processes only where the first of this process's queue has conflicted, and for a
// second.
func TestOtherProcessesAreWaitedForAfterAConflict(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	a, b := bucket.Key{Name: "a"}, bucket.Key{Name: "b"}
	for _, schema := range []string{"ratelimit", ""} {
		q := New(schema)
		q.Now = func() time.Time { return now }
		attempt := func(keys ...bucket.Key) (willWait bool) {
			ticket := q.Ticket(nil)
			ticket.Begin(t.Context(), nil)
			for _, k := range keys {
				if ticket.tx != nil {
					ticket.tx.used = true // it waits before its first statement only
				}
				ticket.Enter(t.Context(), []bucket.Ask{{Key: k}})
			}
			ticket.Release()
			return ticket.Conflict()
		}
		isShared := func(k bucket.Key) bool { return !now.After(q.of[k].sharedUntil) }
		require.False(t, attempt(a), "it may have met a transaction of this process")
		require.False(t, isShared(a))
		require.True(t, attempt(a, b), "it was the first of the queue")
		require.Equal(t, schema != "", isShared(a))
		require.False(t, isShared(b), "nobody queued there")
		now = now.Add(queueMemory + 1)
		require.False(t, isShared(a))
		require.False(t, attempt(a), "it was a while ago")
	}
}

// Two buckets never share a lock, nor one bucket of two schemas, and it is the same in every process.
func TestTurnLocksNeverCollide(t *testing.T) {
	t.Parallel()
	seen := make(map[int64]string)
	for _, schema := range []string{"ratelimit", "ratelimit2"} {
		for _, k := range []bucket.Key{
			{Name: "a"}, {Name: "a", Key: "b"}, {Name: "a", Key: "b", Shard: 1}, {Name: "ab"}, {Name: "a\",\"b"}, {Key: "ab"}, {Key: "a"},
		} {
			lock := lockOf(schema, k)
			require.Empty(t, seen[lock], "%s %v", schema, k)
			seen[lock] = fmt.Sprint(schema, k)
			require.Equal(t, lock, lockOf(schema, k))
		}
		prune := fnv.New64a() // as in internal/engine/store/postgres.go
		prune.Write([]byte("pgratelimit prune " + schema))
		require.Empty(t, seen[int64(prune.Sum64())])
	}
	require.Equal(t, int64(lockOfA), lockOf("ratelimit", bucket.Key{Name: "a"}), "programs of all versions have to agree")
}

// A transaction whose wait fails continues on its connection, and leaves none of the locks that it had until then.
func TestASkippedTurnLeavesNoLock(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	const mine, theirs = 12, 7 // mine is a lock of the application's, which it keeps
	stranger, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer stranger.Release()
	_, err = stranger.Exec(t.Context(), `SELECT pg_advisory_lock($1)`, theirs)
	require.NoError(t, err)
	for name, skip := range map[string]func(conn *pgx.Conn) time.Duration{
		"Timeout": func(*pgx.Conn) time.Duration { return time.Millisecond },
		"Cancel": func(conn *pgx.Conn) time.Duration {
			waiter := conn.PgConn().PID()
			go func() {
				for cancelled := false; !cancelled && t.Context().Err() == nil; {
					_ = pool.QueryRow(t.Context(), `SELECT pg_cancel_backend(pid) FROM pg_locks
						WHERE pid = $1 AND locktype = 'advisory' AND NOT granted`, waiter).Scan(&cancelled)
				}
			}()
			return time.Hour
		},
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := pool.Acquire(t.Context())
			require.NoError(t, err)
			defer conn.Release()
			_, err = conn.Exec(t.Context(), `SELECT pg_advisory_lock($1)`, mine)
			require.NoError(t, err)
			begun, err := conn.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.Serializable})
			require.NoError(t, err)
			tx := &turnTx{Tx: begun}
			came, waited := tx.await(t.Context(), []int64{-1 << 62, -7, theirs, lockOfA}, skip(conn.Conn()))
			require.False(t, came)
			require.True(t, waited)
			require.True(t, tx.used)
			var level string
			var locks []int64
			require.NoError(t, tx.QueryRow(t.Context(), `SELECT current_setting('transaction_isolation'),
				array(SELECT (classid::bigint << 32) | objid::bigint FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())`).Scan(&level, &locks))
			require.Equal(t, "serializable", level)
			require.Equal(t, []int64{mine}, locks)
			require.NoError(t, tx.Rollback(t.Context()))
			_, err = conn.Exec(t.Context(), `SELECT pg_advisory_unlock($1)`, mine)
			require.NoError(t, err)
		})
	}
}

// lockOfA is the lock of the bucket that everybody shares, of the limit "a".
const lockOfA = 2121283802086399797
