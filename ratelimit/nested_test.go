package ratelimit

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

// A call in a nested transaction queues for its bucket as one in the transaction itself does.
func TestNestedTransactionsQueue(t *testing.T) {
	t.Parallel()
	limiter, err := New(postgrestest.New(t), Config{})
	require.NoError(t, err)
	limiter.queues.now = func() time.Time { return opening } // the conflict is always a moment ago
	request := Define("queued", PerHour(100)).For("key")
	met := bucket.Key{Name: "queued", Key: "key"}
	limiter.queues.conflict([]bucket.Key{met})
	require.NoError(t, limiter.InTx(t.Context(), func(tx pgx.Tx) error {
		return pgx.BeginFunc(t.Context(), tx, func(nested pgx.Tx) error {
			return pgx.BeginFunc(t.Context(), nested, func(deep pgx.Tx) error {
				_, err := limiter.WithTx(deep).Take(t.Context(), request)
				require.NoError(t, err)
				require.Equal(t, 1, limiter.queues.of[met].users, "it is at the head of the queue")
				require.Empty(t, limiter.queues.of[met].turn)
				return nil
			})
		})
	}))
	require.Zero(t, limiter.queues.of[met].users, "until the transaction has ended")
}
