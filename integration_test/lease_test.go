package integration_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// daylong returns a limit on concurrency whose leases outlive any test.
func daylong(name string, most int) ratelimit.Limit {
	return ratelimit.Define(name, ratelimit.Concurrency{Most: most, Lease: 24 * time.Hour})
}

// slots returns a limit on concurrency with a long lease.
func slots(name string, most int) ratelimit.Limit {
	return ratelimit.Define(name, ratelimit.Concurrency{Most: most, Lease: time.Hour})
}

func TestASlotIsHeldUntilItIsGivenBack(t *testing.T) {
	t.Parallel()
	b := setup(t)
	jobs := slots("jobs", 2)
	first, err := b.limiter.Acquire(t.Context(), jobs.For("k"))
	require.NoError(t, err)
	require.True(t, first.Allowed)
	require.Equal(t, time.Hour, first.Until.Sub(first.At))
	second, err := b.limiter.Acquire(t.Context(), jobs.For("k"))
	require.NoError(t, err)
	require.Greater(t, second.Fence, first.Fence)
	refused, err := b.limiter.Acquire(t.Context(), jobs.For("k"))
	require.NoError(t, err)
	require.False(t, refused.Allowed)
	require.Empty(t, refused.ID)
	require.Equal(t, first.Until.Sub(refused.At), refused.RetryAfter, "at the latest when the first lease ends")

	require.NoError(t, b.limiter.Release(t.Context(), first.ID))
	require.ErrorIs(t, b.limiter.Release(t.Context(), first.ID), ratelimit.ErrLeaseLost)
	_, err = b.limiter.RenewLease(t.Context(), first.ID)
	require.ErrorIs(t, err, ratelimit.ErrLeaseLost)
	renewed, err := b.limiter.RenewLease(t.Context(), second.ID)
	require.NoError(t, err)
	require.Equal(t, second.ID, renewed.ID)
	require.Equal(t, second.Fence, renewed.Fence)
	require.Equal(t, time.Hour, renewed.Until.Sub(renewed.At))
	v, err := b.limiter.Value(t.Context(), jobs.For("k"))
	require.NoError(t, err)
	require.Equal(t, 1.0, v.Tokens)
	require.Equal(t, 2.0, v.At(renewed.Until))
	require.Equal(t, 1.0, v.At(renewed.Until.Add(-time.Microsecond)))
	third, err := b.limiter.Acquire(t.Context(), jobs.For("k"))
	require.NoError(t, err)
	require.True(t, third.Allowed)
	require.Greater(t, third.Fence, second.Fence)
}
