package ratelimit

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestLeaseFromContext promises that the work finds the innermost lease, and none without a lease.
func TestLeaseFromContext(t *testing.T) {
	t.Parallel()
	l, err := New(&answering{}, Config{})
	require.NoError(t, err)
	_, found := LeaseFromContext(t.Context())
	require.False(t, found)
	held, release := l.Keep(t.Context(), Lease{})
	_, found = LeaseFromContext(held)
	require.False(t, found)
	require.NoError(t, held.Err())
	release()
	require.Equal(t, context.Canceled, held.Err())
}
