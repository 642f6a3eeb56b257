//go:build unix

package server_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// While a transaction keeps its snapshot, no version of a hot row can be removed. Decisions continue and are exact. Time and space
// are logged, but not asserted.
func TestAnOldSnapshotIsHeldOverAHotRow(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "servers of its own")
	const callers, each = 4, 250
	url := postgrestest.NewDatabase(t)
	calling, watching := connect(t, url), connect(t, url)
	limiter, err := ratelimit.New(calling.pool, ratelimit.Config{Timeout: patient, NoBatching: true}) // a version of the row for each call
	require.NoError(t, err)
	hot := ratelimit.Define("hot", ratelimit.TokenBucket{Rate: callers*each + 1, Period: century})
	_, err = limiter.Take(t.Context(), hot.For("key"))
	require.NoError(t, err)
	first := watching.bucket(t, hot)

	old, err := watching.pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	defer func() { _ = old.Rollback(context.WithoutCancel(t.Context())) }()
	sees := func() (value float64) {
		require.NoError(t, old.QueryRow(t.Context(), `SELECT value FROM ratelimit.buckets WHERE name = 'hot'`).Scan(&value))
		return value
	}
	require.Equal(t, first.value, sees())

	var spans [callers][2]time.Duration // of the first tenth of the calls, and of the last
	var group errgroup.Group
	for caller := range callers {
		group.Go(func() error {
			for i := range each {
				began := time.Now()
				if err := takeOnce(t.Context(), limiter, hot.For("key"), i%4 == 0); err != nil {
					return err
				}
				switch {
				case i < each/10:
					spans[caller][0] += time.Since(began)
				case i >= each-each/10:
					spans[caller][1] += time.Since(began)
				}
			}
			return nil
		})
	}
	require.NoError(t, group.Wait())
	require.Equal(t, first.value, sees(), "the snapshot was held")
	d, err := limiter.Take(t.Context(), hot.For("key"))
	require.NoError(t, err)
	require.False(t, d.Allowed, "as many were given as there were")
	require.InDelta(t, 0, watching.bucket(t, hot).value, 0.01)

	size := one[int](t, watching.pool, `SELECT pg_relation_size('ratelimit.buckets') / 8192`)
	require.NoError(t, old.Rollback(t.Context()))
	calling.pool.Close() // sessions report when they end
	var updates, hotUpdates int
	eventually(t, "the sessions have reported", func() bool {
		require.NoError(t, watching.pool.QueryRow(t.Context(), `SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables
			WHERE schemaname = 'ratelimit' AND relname = 'buckets'`).Scan(&updates, &hotUpdates))
		return updates >= callers*each
	})
	t.Logf("%d updates of one row, %d of them touched no index; %d pages; a call took %v at first and %v at last", updates, hotUpdates, size,
		mean(spans, 0, each), mean(spans, 1, each))

	watching.exec(t, `VACUUM ratelimit.buckets`)
	require.NoError(t, watching.limiter.Reset(t.Context(), hot.For("key")))
	require.NoError(t, takeOnce(t.Context(), watching.limiter, hot.For("key"), true))
}

// mean returns the mean duration of a call in a tenth of the calls of each caller.
func mean(spans [4][2]time.Duration, which, each int) (span time.Duration) {
	for _, of := range spans {
		span += of[which]
	}
	return (span / time.Duration(len(spans)*each/10)).Round(time.Microsecond)
}

// takeOnce takes for a request, for which there has to be enough.
func takeOnce(ctx context.Context, limiter *ratelimit.Limiter, request ratelimit.Request, inTx bool) error {
	take := func(l *ratelimit.Limiter) error {
		d, err := l.Take(ctx, request)
		if err != nil {
			return err
		}
		return d.Err()
	}
	if !inTx {
		return take(limiter)
	}
	return limiter.InTx(ctx, func(tx pgx.Tx) error { return take(limiter.WithTx(tx)) })
}
