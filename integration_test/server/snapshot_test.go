//go:build unix

package server_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// While a transaction keeps its snapshot, no version of a hot row can be removed. Decisions continue and are exact.
func TestAnOldSnapshotIsHeldOverAHotRow(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "a thousand updates of one row")
	const callers, each = 4, 250
	w, ctx := world.New(t), t.Context()
	limiter := w.With(t, ratelimit.Config{NoBatching: true}) // a version of the row for each call
	hot := ratelimit.Define("hot", world.Hoard(callers*each+1)).Global()
	require.NoError(t, limiter.Require(ctx, hot))
	first := w.Held(t, "hot", "")
	old := w.Begin(t, pgx.RepeatableRead)
	sees := func() (value float64) {
		require.NoError(t, old.QueryRow(ctx, `SELECT value FROM ratelimit.buckets WHERE name = 'hot'`).Scan(&value))
		return value
	}
	require.Equal(t, first, sees())
	require.NoError(t, atonce.Do(callers, func(int) error {
		for i := range each {
			take := func(l *ratelimit.Limiter) error { return l.Require(ctx, hot) }
			if i%4 > 0 {
				if err := take(limiter); err != nil {
					return err
				}
			} else if err := limiter.InTx(ctx, func(tx pgx.Tx) error { return take(limiter.WithTx(tx)) }); err != nil {
				return err
			}
		}
		return nil
	}))
	require.Equal(t, first, sees(), "the snapshot was held")
	require.ErrorIs(t, limiter.Require(ctx, hot), ratelimit.ErrLimited, "as many were given as there were")
	require.InDelta(t, 0, w.Held(t, "hot", ""), 0.01)
}
