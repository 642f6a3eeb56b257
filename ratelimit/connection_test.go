package ratelimit

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
)

// Calls are folded on a pool only: a connection is for one caller at a time, and a batch may run on another goroutine.
func TestCallsOnASingleConnectionAreNotFolded(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	pooled, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer pooled.Release()
	for _, test := range []struct {
		pool  Pool
		folds bool
	}{{pool, true}, {pooled, false}, {pooled.Conn(), false}} {
		limiter, err := New(test.pool, Config{})
		require.NoError(t, err)
		require.Equal(t, test.folds, batched{limiter}.Folds(), "%T", test.pool)
	}
}
