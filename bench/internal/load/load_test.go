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

	t.Run("MakesTheCallsAskedForInEachRound", func(t *testing.T) {
		t.Parallel()
		var made atomic.Int64
		group := load.NewGroup(4, 1)
		for round := range 2 {
			result, err := group.Run(t.Context(), load.Amount{Calls: 40}, func(context.Context, *load.Caller) error {
				made.Add(1)
				return nil
			})
			require.NoError(t, err)
			require.EqualValues(t, 40*(round+1), made.Load())
			require.Equal(t, 40, result.Calls)
			require.LessOrEqual(t, result.P50, result.P99)
		}
	})
	t.Run("MetersTheCallsAlone", func(t *testing.T) {
		t.Parallel()
		group, now := load.NewGroup(1, 1), 100.0
		call := func(context.Context, *load.Caller) error { now += 2; return nil }
		result, err := group.Run(t.Context(), load.Amount{Calls: 3}, call)
		require.NoError(t, err)
		require.True(t, math.IsNaN(result.Processor), "without a meter it is not known")
		group.Meter = func() float64 { return now }
		result, err = group.Run(t.Context(), load.Amount{Calls: 3}, call)
		require.NoError(t, err)
		require.InDelta(t, 6, result.Processor, 0)
	})
	t.Run("CallsWithoutAnEndUntilTheTimeIsUp", func(t *testing.T) {
		t.Parallel()
		const d = 5 * time.Millisecond
		result, err := load.NewGroup(2, 16).Run(t.Context(), load.Amount{For: d}, func(context.Context, *load.Caller) error { return nil })
		require.NoError(t, err)
		require.GreaterOrEqual(t, result.Elapsed, d)
		require.Positive(t, result.Calls)
		require.Zero(t, result.Calls%16, "bursts are whole")
	})
	t.Run("StopsEveryoneAtTheFirstError", func(t *testing.T) {
		t.Parallel()
		broken := errors.New("broken")
		_, err := load.NewGroup(3, 1).Run(t.Context(), load.Amount{For: time.Hour}, func(ctx context.Context, c *load.Caller) error {
			if c.Number == 1 {
				return broken
			}
			<-ctx.Done()
			return ctx.Err()
		})
		require.ErrorIs(t, err, broken)
	})
}
