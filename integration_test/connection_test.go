package integration_test

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

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
