package integration_test

import (
	"context"
	"hash/fnv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// A process does not prune a schema while another one does, which holds the schema's advisory lock.
func TestPruneRunsOnceAtATimeInASchema(t *testing.T) {
	t.Parallel()
	b := setup(t)
	require.NoError(t, migrations.Up(t.Context(), b.pool, migrations.Config{Schema: "other"}))
	elsewhere := b.with(t, ratelimit.Config{Schema: "other"})
	for _, schema := range []string{"ratelimit", "other"} {
		b.exec(t, "INSERT INTO "+schema+".buckets VALUES ('quick', 'idle', 0, 10, 0)")
	}
	h := fnv.New64a()
	h.Write([]byte("pgratelimit prune ratelimit"))
	another := b.begin(t, pgx.ReadCommitted)
	_, err := another.Exec(t.Context(), `SELECT pg_advisory_xact_lock($1)`, int64(h.Sum64()))
	require.NoError(t, err)
	prune := func(l *ratelimit.Limiter, deletes int64) {
		n, err := l.Prune(t.Context(), ratelimit.Define("quick", ratelimit.PerSecond(10)))
		require.NoError(t, err)
		require.Equal(t, deletes, n)
	}
	prune(b.limiter, 0)
	prune(elsewhere, 1)
	require.NoError(t, another.Rollback(t.Context()))
	prune(b.limiter, 1)
}

// using is a pool that calls use before it begins its first transaction.
type using struct {
	ratelimit.Pool
	once sync.Once
	use  func(ctx context.Context)
}

func (p *using) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	p.once.Do(func() { p.use(ctx) })
	return p.Pool.BeginTx(ctx, options)
}

// A plan that the Limiter is first used with during a Prune counts from then on.
func TestPruneCountsThePlansThatAreUsedMeanwhile(t *testing.T) {
	t.Parallel()
	b := setup(t)
	free, vip := ratelimit.Define("plan", ratelimit.PerHour(10)), ratelimit.Define("plan", ratelimit.TokenBucket{Rate: 10, Period: century})
	now := clockNoon
	pool := &using{Pool: b.pool}
	limiter, err := ratelimit.New(pool, ratelimit.Config{NoBatching: true, AsOf: func() time.Time { return now }})
	require.NoError(t, err)
	b.exec(t, "INSERT INTO ratelimit.buckets VALUES ('plan', 'vip', 0, 5, $1)", clockNoon.UnixMicro())
	now = clockNoon.Add(ratelimit.Day)
	pool.use = func(ctx context.Context) {
		_, err := limiter.Value(ctx, vip.For("vip"))
		require.NoError(t, err)
	}
	deleted, err := limiter.Prune(t.Context(), free)
	require.NoError(t, err)
	require.Zero(t, deleted, "the row is not full as a vip's")
}
