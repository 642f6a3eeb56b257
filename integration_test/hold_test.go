package integration_test

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TestHoldReleases promises that a slot is held while the work runs and free afterwards, however the work ends.
func TestHoldReleases(t *testing.T) {
	t.Parallel()
	b := setup(t)
	jobs, hourly := slots("exports", 1), ratelimit.Define("hourly", ratelimit.TokenBucket{Rate: 100, Period: century})
	failure := errors.New("it failed")
	work := func(end func(ctx context.Context) error) error {
		return b.limiter.Hold(t.Context(), func(ctx context.Context, lease ratelimit.Lease) error {
			require.Zero(t, tokens(t, b.limiter, jobs.For("k")))
			found, held := ratelimit.LeaseFromContext(ctx)
			require.True(t, held)
			require.Equal(t, lease, found)
			return end(ctx)
		}, jobs.For("k"), hourly.For("k").Cost(2))
	}
	require.NoError(t, work(func(context.Context) error { return nil }))
	require.Equal(t, failure, work(func(context.Context) error { return failure }))
	require.PanicsWithValue(t, "broken", func() { _ = work(func(context.Context) error { panic("broken") }) })
	require.True(t, ended(func() { _ = work(func(context.Context) error { runtime.Goexit(); return nil }) }))
	var kept context.Context
	require.NoError(t, work(func(ctx context.Context) error { kept = ctx; return nil }))
	require.Equal(t, context.Canceled, context.Cause(kept), "the context ends with the work")
	require.Equal(t, 1.0, tokens(t, b.limiter, jobs.For("k")))
	require.InDelta(t, 90, b.held(t, "hourly", "k"), 1e-6, "tokens stay taken")
}

// TestHoldRefuses promises that work does not run without a slot, for any reason, and that nothing is taken.
func TestHoldRefuses(t *testing.T) {
	t.Parallel()
	b := setup(t)
	jobs, hourly := slots("jobs", 1), ratelimit.Define("hourly", ratelimit.TokenBucket{Rate: 100, Period: century})
	never := func(context.Context, ratelimit.Lease) error { return errors.New("it ran") }
	require.NoError(t, b.limiter.Hold(t.Context(), func(ctx context.Context, _ ratelimit.Lease) error {
		err := b.limiter.Hold(ctx, never, jobs.For("k"), hourly.For("k"))
		var limited *ratelimit.LimitedError
		require.ErrorAs(t, err, &limited)
		require.Positive(t, limited.Decision.RetryAfter)
		require.LessOrEqual(t, limited.Decision.RetryAfter, time.Hour)
		return nil
	}, jobs.For("k")))
	require.ErrorIs(t, b.limiter.Hold(t.Context(), never, hourly.For("k")), ratelimit.ErrInvalidRequest)
	held, release := b.limiter.KeepAlive(t.Context(), ratelimit.Lease{ID: "L1"})
	require.ErrorIs(t, context.Cause(held), ratelimit.ErrLeaseLost)
	require.ErrorIs(t, context.Cause(held), ratelimit.ErrInvalidLease)
	release()
}
