package ratelimit_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// TestAcquireInMemoryWhoseCallerLeaves promises that the call has ended when it returns, and took nothing, so that the
// clock isn't read any more: a Simulation's may be set then.
func TestAcquireInMemoryWhoseCallerLeaves(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		exports := ratelimit.Define("exports", ratelimit.Concurrency{Slots: 5, Lease: time.Hour})
		tokens := ratelimit.Define("tokens", ratelimit.PerMinute(5))
		db, returned := ratelimittest.NewDB(), false
		limiter, err := ratelimit.New(db, ratelimit.Config{AsOf: func() time.Time {
			require.False(t, returned)
			return time.Now()
		}})
		require.NoError(t, err)
		tx, err := db.BeginTx(t.Context(), pgx.TxOptions{})
		require.NoError(t, err)
		require.NoError(t, limiter.WithTx(tx).Require(t.Context(), tokens.For("ada"))) // whose row it then holds
		ctx, leave := context.WithTimeout(t.Context(), time.Second)
		defer leave()
		_, err = limiter.Acquire(ctx, exports.For("ada").Cost(2), tokens.For("ada"))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		returned = true
		require.NoError(t, tx.Commit(t.Context()))
		synctest.Wait()
		returned = false
		free, err := limiter.Value(t.Context(), exports.For("ada"))
		require.NoError(t, err)
		require.InDelta(t, 5, free.Tokens, 0)
	})
}
