package guard_test

import (
	"context"
	"fmt"
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/guard"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

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
		require.Equal(t, guard.Cancelled, guard.Result(gone, err, true), err)
	}
}
