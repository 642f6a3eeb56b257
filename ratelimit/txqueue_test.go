package ratelimit

import (
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

// The queues of a process are for what is contended now, and take no more memory than that.
func TestQueuesAreBoundedAndForgotten(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	q := newQueues()
	q.now, q.limit = func() time.Time { return now }, 3
	names := func(first, n int) (keys []bucket.Key) {
		for i := range n {
			keys = append(keys, bucket.Key{Name: "limit", Key: strconv.Itoa(first + i)})
		}
		return keys
	}
	require.Nil(t, q.join(names(0, 1)[0]), "nobody has met there")

	q.conflict(names(0, 10))
	require.Len(t, q.of, 3)
	held := q.join(names(0, 1)[0])
	require.NotNil(t, held)
	require.True(t, held.wait(t.Context(), 0))
	require.False(t, held.wait(t.Context(), 0), "one at a time")

	now = now.Add(queueMemory + 1)
	require.Nil(t, q.join(names(1, 1)[0]), "it was a while ago")
	q.conflict(names(20, 10))
	require.Len(t, q.of, 3)
	require.Same(t, held, q.of[names(0, 1)[0]], "somebody is in it")
	q.leave(held, true)

	now = now.Add(queueMemory + 1)
	q.conflict(names(40, 3))
	require.Len(t, q.of, 3)
	require.Nil(t, q.join(names(0, 1)[0]))
}

// A call in a nested transaction queues for its bucket as one in the transaction itself does.
func TestNestedTransactionsQueue(t *testing.T) {
	t.Parallel()
	limiter, err := New(postgrestest.New(t), Config{})
	require.NoError(t, err)
	now := time.Now()
	limiter.queues.now = func() time.Time { return now } // the conflict is always a moment ago
	request := Define("queued", PerHour(100)).For("key")
	met := bucket.Key{Name: "queued", Key: "key"}
	limiter.queues.conflict([]bucket.Key{met})
	require.NoError(t, limiter.InTx(t.Context(), func(tx pgx.Tx) error {
		return pgx.BeginFunc(t.Context(), tx, func(nested pgx.Tx) error {
			return pgx.BeginFunc(t.Context(), nested, func(deep pgx.Tx) error {
				_, err := limiter.WithTx(deep).Take(t.Context(), request)
				require.NoError(t, err)
				require.Equal(t, 1, limiter.queues.of[met].users, "it is at the head of the queue")
				require.Empty(t, limiter.queues.of[met].lock)
				return nil
			})
		})
	}))
	require.Zero(t, limiter.queues.of[met].users, "until the transaction has ended")
}

// A transaction that reads before it takes is run once where it names the bucket, in the queues of the process and in
// those of all.
func TestNamedTransactionsThatReadFirstRunOnce(t *testing.T) {
	t.Parallel()
	const workers, rounds = 4, 5
	for _, shared := range []bool{false, true} {
		limiter, err := New(postgrestest.New(t, func(c *pgxpool.Config) { c.MaxConns = workers }), Config{SharedQueues: shared})
		require.NoError(t, err)
		limiter.queues.wait = time.Hour
		request := Define("queued", PerHour(100)).For("key")
		ctx := WithQueue(t.Context(), request)
		var attempts atomic.Int64
		var group sync.WaitGroup
		for range workers {
			group.Go(func() {
				for range rounds {
					err := limiter.InTx(ctx, func(tx pgx.Tx) error {
						attempts.Add(1)
						if _, err := tx.Exec(ctx, `SELECT count(*) FROM pg_class`); err != nil {
							return err
						}
						_, err := limiter.WithTx(tx).Take(ctx, request)
						return err
					})
					if err != nil {
						t.Error(err)
					}
				}
			})
		}
		group.Wait()
		require.EqualValues(t, workers*rounds, attempts.Load(), "shared: %t", shared)
	}
}
