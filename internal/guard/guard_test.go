package guard_test

import (
	"context"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// A decision ends at its own timeout or at the deadline of the request, and outlives the client.
func TestDeciding(t *testing.T) {
	t.Parallel()
	gone, leave := context.WithCancel(t.Context())
	leave()
	ctx, cancel := guard.Deciding(gone, time.Hour)
	defer cancel()
	require.NoError(t, ctx.Err())
	until, bounded := ctx.Deadline()
	require.True(t, bounded)
	bound, cancelBound := context.WithDeadline(t.Context(), until.Add(-time.Minute))
	defer cancelBound()
	sooner, cancelSooner := guard.Deciding(bound, time.Hour)
	defer cancelSooner()
	got, _ := sooner.Deadline()
	require.Equal(t, until.Add(-time.Minute), got)
	late, cancelLate := context.WithDeadline(t.Context(), time.Unix(0, 0))
	defer cancelLate()
	require.Equal(t, guard.Cancelled, guard.Result(late, fmt.Errorf("take: %w", context.DeadlineExceeded), true))
	require.Equal(t, guard.Cancelled, guard.Result(gone, fmt.Errorf("key: %w", context.Canceled), true))
}

// If open, a guard allows requests that the store did not decide, and no others.
func TestResult(t *testing.T) {
	t.Parallel()
	gone, leave := context.WithCancel(t.Context())
	leave()
	for _, c := range []struct {
		err          error
		closed, open string
	}{
		{io.EOF, guard.FailedClosed, guard.FailedOpen},
		{context.DeadlineExceeded, guard.FailedClosed, guard.FailedOpen}, // the decision's, not the request's
		{ratelimit.ErrNotMigrated, guard.FailedClosed, guard.FailedOpen},
		{ratelimit.ErrContended, guard.FailedClosed, guard.FailedClosed},
		{ratelimit.ErrOverloaded, guard.FailedClosed, guard.FailedClosed},
		{ratelimit.ErrClosed, guard.FailedClosed, guard.FailedClosed},
		{ratelimit.ErrInvalidRequest, guard.FailedClosed, guard.FailedClosed},
		{ratelimit.ErrInvalidLimit, guard.FailedClosed, guard.FailedClosed},
		{ratelimit.ErrInvalidConfig, guard.FailedClosed, guard.FailedClosed},
		{ratelimit.ErrInvalidKey, guard.BadKey, guard.BadKey},
		{ratelimit.ErrInvalidCost, guard.BadCost, guard.BadCost},
		{ratelimit.ErrCostExceedsCapacity, guard.TooCostly, guard.TooCostly},
	} {
		err := fmt.Errorf("take: %w", c.err)
		require.Equal(t, c.closed, guard.Result(t.Context(), err, false), err)
		require.Equal(t, c.open, guard.Result(t.Context(), err, true), err)
		require.Equal(t, c.open, guard.Result(gone, err, true), "the decision goes on without the client: %v", err)
	}
}
