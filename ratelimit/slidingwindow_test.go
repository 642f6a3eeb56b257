package ratelimit

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// A sliding window has 60 slices, or the next smaller number that divides its period.
func TestSlicesOfASlidingWindow(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		period time.Duration
		slices int32
	}{
		{time.Minute, 60}, {time.Second, 50}, {999_983 * time.Microsecond, 1}, {time.Microsecond, 1}, {36525 * Day, 60},
	} {
		terms := Define("sliding", SlidingWindow{Rate: 5, Period: test.period}).terms()
		require.Equal(t, bucket.Sliding{Slices: test.slices}, terms.Kind)
		require.Equal(t, test.period.Microseconds()/int64(test.slices), terms.Step)
		require.False(t, terms.Reserves)
	}
	require.Equal(t, bucket.Sliding{Slices: 128}, Define("sliding", SlidingWindow{Rate: 5, Period: 128 * time.Second, Slices: 128}).terms().Kind)
}
