package load_test

import (
	"context"
	"errors"
	"math"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
)

func TestGroup(t *testing.T) {
	t.Parallel()

	t.Run("CallsUntilTheTimeIsUp", func(t *testing.T) {
		t.Parallel()
		const d = 5 * time.Millisecond
		var made atomic.Int64
		group := load.NewGroup(4)
		for range 2 {
			made.Store(0)
			result, err := group.Run(t.Context(), d, func(context.Context, *load.Caller) error {
				made.Add(1)
				return nil
			})
			require.NoError(t, err)
			require.GreaterOrEqual(t, result.Elapsed, d)
			require.EqualValues(t, made.Load(), result.Calls)
			require.LessOrEqual(t, result.P50, result.P99)
		}
	})
	t.Run("MetersTheCallsAlone", func(t *testing.T) {
		t.Parallel()
		group, now := load.NewGroup(1), 100.0
		call := func(context.Context, *load.Caller) error { now += 2; return nil }
		result, err := group.Run(t.Context(), 0, call)
		require.NoError(t, err)
		require.True(t, math.IsNaN(result.Processor), "without a meter it is not known")
		group.Meter = func() float64 { return now }
		result, err = group.Run(t.Context(), 0, call)
		require.NoError(t, err)
		require.InDelta(t, 2, result.Processor, 0)
	})
	t.Run("StopsEveryoneAtTheFirstError", func(t *testing.T) {
		t.Parallel()
		broken := errors.New("broken")
		_, err := load.NewGroup(3).Run(t.Context(), time.Hour, func(ctx context.Context, c *load.Caller) error {
			if c.Number == 1 {
				return broken
			}
			<-ctx.Done()
			return ctx.Err()
		})
		require.ErrorIs(t, err, broken)
	})
}
