package turns

import (
	"context"
	"fmt"
	"hash/fnv"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
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

	q.Conflict(names(0, 10))
	require.Len(t, q.of, 3)
	held := q.join(names(0, 1)[0])
	require.NotNil(t, held)
	require.True(t, held.wait(t.Context(), 0))
	require.False(t, held.wait(t.Context(), 0), "one at a time")

	now = now.Add(queueMemory + 1)
	require.Nil(t, q.join(names(1, 1)[0]), "it was a while ago")
	q.Conflict(names(20, 10))
	require.Len(t, q.of, 3)
	require.Same(t, held, q.of[names(0, 1)[0]], "somebody is in it")
	q.leave(held, true)

	now = now.Add(queueMemory + 1)
	q.Conflict(names(40, 3))
	require.Len(t, q.of, 3)
	require.Nil(t, q.join(names(0, 1)[0]))
}

// A transaction on several buckets takes its turn at the bucket where most transactions conflict. If that is a tie, all of them
// choose the same bucket.
func TestTheQueueIsAtTheMostContendedBucket(t *testing.T) {
	t.Parallel()
	q := New("")
	first, second, all := bucket.Key{Name: "a"}, bucket.Key{Name: "b"}, bucket.Key{Name: "z"}
	_, in := q.joinHottest([]bucket.Key{first})
	require.Nil(t, in)
	q.Conflict([]bucket.Key{second, first})
	q.Conflict([]bucket.Key{second})
	for _, wanted := range [][]bucket.Key{{first, second, all}, {second, all, first}} {
		chosen, _ := q.joinHottest(wanted)
		require.Equal(t, first, chosen)
	}
	for range 10 {
		q.Conflict([]bucket.Key{second, all})
	}
	chosen, in := q.joinHottest([]bucket.Key{first, all})
	require.Equal(t, all, chosen)
	require.Same(t, q.of[all], in)
	require.Equal(t, 1, in.users)
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
		prune := fnv.New64a() // as in internal/store/prune.go
		prune.Write([]byte("pgratelimit prune " + schema))
		require.Empty(t, seen[int64(prune.Sum64())])
	}
	require.Equal(t, int64(lockOfA), lockOf("ratelimit", bucket.Key{Name: "a"}), "programs of all versions have to agree")
}

// If the timeout and the lock arrive together, the session holds the lock. A transaction that continues without a turn releases it.
func TestASkippedTurnLeavesNoLock(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	for _, lock := range []int64{7, -7, 1 << 62, -1 << 62, lockOfA} {
		conn, err := pool.Acquire(t.Context())
		require.NoError(t, err)
		const mine = 12 // a lock of the application's, which it keeps
		_, err = conn.Exec(t.Context(), `SELECT pg_advisory_lock($1), pg_advisory_lock($2)`, lock, mine)
		require.NoError(t, err)
		begun, err := conn.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.Serializable})
		require.NoError(t, err)
		tx := &turnTx{Tx: cancelled{begun}}
		require.False(t, tx.used)
		var over []bool
		require.NoError(t, tx.await(t.Context(), &turn{lock: lock, wait: time.Hour, over: func(came, waited bool) { over = append(over, came, waited) }}))
		require.Equal(t, []bool{false, false}, over)
		require.True(t, tx.used)
		var level string
		var locks []int64
		require.NoError(t, tx.QueryRow(t.Context(), `SELECT current_setting('transaction_isolation'),
			array(SELECT (classid::bigint << 32) | objid::bigint FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())`).Scan(&level, &locks))
		require.Equal(t, "serializable", level)
		require.Equal(t, []int64{mine}, locks)
		require.NoError(t, tx.Rollback(t.Context()))
		require.NoError(t, conn.Conn().Close(t.Context()))
		conn.Release()
	}
}

// lockOfA is the lock of the bucket that everybody shares, of the limit "a".
const lockOfA = 2121283802086399797

// cancelled is a transaction that is cancelled during its wait.
type cancelled struct{ pgx.Tx }

// SendBatch sends a statement that fails like a cancelled one.
func (f cancelled) SendBatch(ctx context.Context, _ *pgx.Batch) pgx.BatchResults {
	batch := &pgx.Batch{}
	batch.Queue(`DO $$ BEGIN RAISE query_canceled; END $$`)
	return f.Tx.SendBatch(ctx, batch)
}
