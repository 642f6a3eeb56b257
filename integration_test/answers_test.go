package integration_test

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// echoing is a pool whose server answers the statements that only read with every row twice, as a database that
// keeps the table in several places may.
type echoing struct{ ratelimit.Pool }

func twice(sql string) string {
	return "SELECT q.* FROM (" + sql + ") AS q, generate_series(1, 2)"
}

func (p echoing) Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error) {
	return p.Pool.Query(ctx, twice(sql), arguments...)
}

func (p echoing) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	last := batch.QueuedQueries[batch.Len()-1]
	last.SQL = twice(last.SQL)
	return p.Pool.SendBatch(ctx, batch)
}

func TestMoreRowsThanAskedAreAnError(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "it answers for a statement of the fast path")
	b := setup(t)
	alone, err := ratelimit.New(echoing{b.pool}, ratelimit.Config{NoBatching: true})
	require.NoError(t, err)
	batched, err := ratelimit.New(echoing{b.pool}, ratelimit.Config{})
	require.NoError(t, err)
	for name, call := range map[string]verb{
		"Value":        valuing(roomy.For("key")),
		"Check":        checking(roomy.For("key"), other.For("key")),
		"ShardedValue": valuing(wide.For("key")),
		"ShardedTake":  taking(wide.For("key").Cost(2e5)), // of all rows
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := call(t.Context(), alone)
			require.ErrorContains(t, err, "rows")
			require.ErrorContains(t, atonce.Do(8, func(int) error { return errOf(call(t.Context(), batched)) }), "rows")
		})
	}
}

// batchCount is an Observer that counts batches.
type batchCount struct{ batches atomic.Int64 }

func (c *batchCount) Observe(_ context.Context, event ratelimit.Event) {
	if _, ok := event.(ratelimit.Batched); ok {
		c.batches.Add(1)
	}
}

// Calls on a single connection, or without batches, are not reported as a batch. TestACallApartStaysOnItsGoroutine tests that no
// other goroutine uses the connection.
func TestCallsOnASingleConnectionAreNotFolded(t *testing.T) {
	t.Parallel()
	b := setup(t)
	pooled, err := b.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer pooled.Release()
	for name, pool := range map[string]ratelimit.Pool{"Pool": b.pool, "ConnectionOfAPool": pooled, "Connection": pooled.Conn()} {
		seen := &batchCount{}
		limiter, err := ratelimit.New(pool, ratelimit.Config{Observer: seen})
		require.NoError(t, err)
		sharded := spread(4, 100).For(name)
		for range 2 {
			d, err := limiter.Take(t.Context(), sharded)
			require.NoError(t, err, name)
			require.True(t, d.Allowed, name)
		}
		for _, call := range []func(context.Context, ...ratelimit.Request) (ratelimit.Decision, error){limiter.Take, limiter.Check} {
			d, err := call(t.Context(), roomy.For(name), sharded)
			require.NoError(t, err, name)
			require.True(t, d.Allowed, name)
		}
		require.NoError(t, limiter.Close(t.Context()))
		require.Zero(t, seen.batches.Load(), name)
	}
}
