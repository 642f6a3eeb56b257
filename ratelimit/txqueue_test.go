package ratelimit

import (
	"context"
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

// A call in a nested transaction queues for its bucket as one in the transaction itself does.
func TestNestedTransactionsQueue(t *testing.T) {
	t.Parallel()
	limiter, err := New(postgrestest.New(t), Config{})
	require.NoError(t, err)
	now := time.Now()
	limiter.queues.Now = func() time.Time { return now } // the conflict is always a moment ago
	request := Define("queued", PerHour(100)).For("key")
	met := bucket.Key{Name: "queued", Key: "key"}
	limiter.queues.Conflict([]bucket.Key{met})
	gets := func() bool { // whether another transaction gets to the head of the queue at once
		other, ended := limiter.queues.Ticket(nil), t.Context()
		ended, cancel := context.WithCancel(ended)
		cancel()
		other.Enter(ended, []bucket.Ask{{Key: met}})
		other.Release()
		return other.Conflict()
	}
	require.NoError(t, limiter.InTx(t.Context(), func(tx pgx.Tx) error {
		return pgx.BeginFunc(t.Context(), tx, func(nested pgx.Tx) error {
			return pgx.BeginFunc(t.Context(), nested, func(deep pgx.Tx) error {
				_, err := limiter.WithTx(deep).Take(t.Context(), request)
				require.NoError(t, err)
				require.False(t, gets(), "it is at the head of the queue")
				return nil
			})
		})
	}))
	require.True(t, gets(), "until the transaction has ended")
}

// A transaction that reads before it takes runs once if it names the bucket, with the queues of the process and with shared queues.
func TestNamedTransactionsThatReadFirstRunOnce(t *testing.T) {
	t.Parallel()
	const workers, rounds = 4, 5
	for _, shared := range []bool{false, true} {
		limiter, err := New(postgrestest.New(t, func(c *pgxpool.Config) { c.MaxConns = workers }), Config{SharedQueues: shared})
		require.NoError(t, err)
		limiter.queues.Wait = time.Hour
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
