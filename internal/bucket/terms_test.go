package bucket_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
)

func TestFixClock(t *testing.T) {
	t.Parallel()
	for name, terms := range map[string]bucket.Terms{
		"TokenBucket": buckettest.TokenBucket(10, time.Minute, 10),
		"FixedWindow": buckettest.FixedWindow(10, time.Hour, 10, opening),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fixed := terms.FixClock(bucket.State{Value: -3, TS: bucket.MaxInstant}, opening)
			require.Equal(t, bucket.State{Value: -3, TS: opening}, fixed, "it keeps the value")
			require.Equal(t, fixed, terms.FixClock(fixed, opening), "it is done once")
			require.Equal(t, fixed, terms.FixClock(fixed, opening-minute))
			last := bucket.State{Value: 1, TS: opening + terms.Tolerance()}
			require.Equal(t, last, terms.FixClock(last, opening), "up to the tolerance the clock is trusted")
			last.TS++
			require.Equal(t, bucket.State{Value: 1, TS: opening}, terms.FixClock(last, opening))
		})
	}
}

func TestPhaseOf(t *testing.T) {
	t.Parallel()
	const hour = 60 * minute
	for _, start := range []int64{bucket.MinInstant, bucket.MinInstant + 1, -1, 0, 1, opening, opening + hour/3, bucket.MaxInstant} {
		for _, step := range []int64{1, 7, minute, hour, century} {
			phase := bucket.PhaseOf(start, step)
			require.GreaterOrEqual(t, phase, bucket.MinInstant)
			require.Less(t, phase, bucket.MinInstant+step)
			require.Zero(t, (start-phase)%step, "a step begins at start")
		}
	}
}
