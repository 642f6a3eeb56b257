package integration_test

import (
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// All attempts of InTx take from the same row of a sharded bucket, in nested transactions too. So a retried transaction returns to
// its queue. Different calls of InTx go to different rows.
func TestAllAttemptsOfInTxTakeFromTheSameRow(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "the general path takes from all rows")
	const shards, attempts, calls = 64, 3, 8
	b := setup(t)
	limiter, _ := b.stopped(t)
	seen := make(map[int32]bool)
	for call := range calls {
		key := fmt.Sprint("key", call)
		request := spread(shards, 1<<16).For(key)
		var taken []int32
		take := func(tx pgx.Tx) error {
			if err := takeAndCheck(t.Context(), limiter.WithTx(tx), []ratelimit.Request{request}); err != nil {
				return err
			}
			row, err := onlyRow(t, tx, key)
			taken = append(taken, row)
			return err
		}
		require.NoError(t, limiter.InTx(t.Context(), func(tx pgx.Tx) error {
			if err := take(tx); err != nil {
				return err
			}
			if err := pgx.BeginFunc(t.Context(), tx, take); err != nil {
				return err
			}
			if len(taken) < 2*attempts {
				return &pgconn.PgError{Code: "40001"} // as if it had met another
			}
			return nil
		}))
		require.Len(t, taken, 2*attempts)
		for _, row := range taken {
			require.Equal(t, taken[0], row, "%v", taken)
		}
		seen[taken[0]] = true
		require.Equal(t, 1<<16-2.0, tokens(t, limiter, request))
	}
	require.Greater(t, len(seen), 1)
}

// onlyRow returns the shard of the one row that a bucket has by now.
func onlyRow(t *testing.T, tx pgx.Tx, key string) (shard int32, err error) {
	t.Helper()
	found, err := tx.Query(t.Context(), `SELECT shard FROM ratelimit.buckets WHERE key = $1`, key)
	if err != nil {
		return 0, err
	}
	return pgx.CollectExactlyOneRow(found, pgx.RowTo[int32])
}
