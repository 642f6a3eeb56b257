package store

import (
	"context"
	"fmt"
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
		s := New(schema, nil)
		for _, k := range []bucket.Key{
			{Name: "a"}, {Name: "a", Key: "b"}, {Name: "a", Key: "b", Shard: 1}, {Name: "ab"}, {Name: "a\",\"b"}, {Key: "ab"}, {Key: "a"},
		} {
			lock := s.TurnLock(k)
			require.Empty(t, seen[lock], "%s %v", schema, k)
			seen[lock] = fmt.Sprint(schema, k)
			require.Equal(t, lock, New(schema, nil).TurnLock(k))
		}
		session := s.OnPool(nil, nil)
		require.Empty(t, seen[session.pruneLock()])
	}
	require.Equal(t, int64(lockOfA), New("ratelimit", nil).TurnLock(bucket.Key{Name: "a"}), "programs of all versions have to agree")
}

// A timeout that comes together with the lock leaves the session with it. Whoever goes on without a turn does not keep it.
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
		tx := &TurnTx{Tx: cancelled{begun}}
		require.True(t, tx.IsFresh())
		var over []bool
		require.NoError(t, tx.Await(t.Context(), Turn{Lock: lock, Wait: time.Hour, Over: func(came, waited bool) { over = append(over, came, waited) }}))
		require.Equal(t, []bool{false, false}, over)
		require.False(t, tx.IsFresh())
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

// cancelled is a transaction that is cancelled where it waits.
type cancelled struct{ pgx.Tx }

// SendBatch sends a statement that fails as one that is cancelled does.
func (f cancelled) SendBatch(ctx context.Context, _ *pgx.Batch) pgx.BatchResults {
	batch := &pgx.Batch{}
	batch.Queue(`DO $$ BEGIN RAISE query_canceled; END $$`)
	return f.Tx.SendBatch(ctx, batch)
}
