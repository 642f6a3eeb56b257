package bucket

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestFixClock(t *testing.T) {
	t.Parallel()
	for name, terms := range map[string]Terms{
		"TokenBucket": tokenBucket(10, time.Minute, 10),
		"FixedWindow": windows(10, time.Hour, 10, opening),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fixed := terms.FixClock(State{Value: -3, TS: MaxInstant}, opening)
			require.Equal(t, State{Value: -3, TS: opening}, fixed, "it keeps the value")
			require.Equal(t, fixed, terms.FixClock(fixed, opening), "it is done once")
			require.Equal(t, fixed, terms.FixClock(fixed, opening-minute))
			last := State{Value: 1, TS: opening + terms.Tolerance()}
			require.Equal(t, last, terms.FixClock(last, opening), "up to the tolerance the clock is trusted")
			last.TS++
			require.Equal(t, State{Value: 1, TS: opening}, terms.FixClock(last, opening))
		})
	}
}

func TestPhaseOf(t *testing.T) {
	t.Parallel()
	const hour = 60 * minute
	for _, start := range []int64{MinInstant, MinInstant + 1, -1, 0, 1, opening, opening + hour/3, MaxInstant} {
		for _, step := range []int64{1, 7, minute, hour, century} {
			phase := PhaseOf(start, step)
			require.GreaterOrEqual(t, phase, MinInstant)
			require.Less(t, phase, MinInstant+step)
			require.Zero(t, (start-phase)%step, "a step begins at start")
		}
	}
}

func TestRefundUntil(t *testing.T) {
	t.Parallel()
	require.Equal(t, int64(math.MaxInt64), tokenBucket(10, time.Minute, 10).RefundUntil(opening+7))
	window := windows(10, time.Minute, 10, opening)
	require.Equal(t, opening, window.RefundUntil(opening))
	require.Equal(t, opening, window.RefundUntil(opening+minute-1))
	require.Equal(t, opening+minute, window.RefundUntil(opening+minute))
}
