package turns

import (
	"context"
	"fmt"
	"hash/fnv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

// Two buckets never share a lock, nor one bucket of two schemas, and it is the same in every process.
func TestTurnLocksAreApart(t *testing.T) {
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
func TestATurnThatWasForgoneLeavesNoLock(t *testing.T) {
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
