package integration_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TakeUpTo waits for a locked row, and takes the units available after the wait.
func TestTakeUpToWaitsForARowThatIsHeld(t *testing.T) {
	t.Parallel()
	b := setup(t)
	five := ratelimit.Define("five", hoard(5))
	for _, c := range callers() {
		t.Run(c.name, func(t *testing.T) { // not parallel: waiting counts all
			require.NoError(t, b.limiter.Reset(t.Context(), five.For(t.Name())))
			holder := b.begin(t, pgx.ReadCommitted)
			requireAllowed(t, taking(five.For(t.Name()).Cost(2)), b.limiter.WithTx(holder))
			waited := make(chan error, 1)
			var taken int
			go func() {
				var err error
				taken, _, err = c.takesUpTo(t.Context(), b.db(), b.limiter, 9, five.For(t.Name()))
				waited <- err
			}()
			eventually(t, "the caller waits for the row", func() bool { return waiting(t, b.pool) == 1 })
			require.NoError(t, holder.Commit(t.Context()))
			require.NoError(t, <-waited)
			require.Equal(t, 3, taken)
		})
	}
}
