package ratelimit_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Without a Start, the windows of each key begin at other instants, which are the same in every process.
func TestFixedWindowWithoutStart(t *testing.T) {
	t.Parallel()
	policy := ratelimit.FixedWindow{Rate: 5, Period: time.Hour}
	begin := func(name, key string) time.Time { // of the window that opening is in
		_, d := ratelimit.Define(name, policy).For(key).Full(opening).Take(opening, 5)
		require.True(t, d.Allowed)
		return opening.Add(d.ResetAfter - time.Hour)
	}
	// FNV-1a of "spread\x00key1" modulo an hour. A release that changes it moves all windows once.
	require.Equal(t, int64(1772408367189456), begin("spread", "key1").UnixMicro())
	require.NotEqual(t, begin("a", "key"), begin("b", "key"))
	require.NotEqual(t, begin("a", "bc"), begin("ab", "c"))
	begins := make(map[time.Duration]int)
	for i := range 1000 {
		begins[begin("spread", fmt.Sprintf("key%d", i)).Sub(opening).Truncate(6*time.Minute)]++
	}
	require.Len(t, begins, 10) // of ten stretches of six minutes
	for stretch, keys := range begins {
		require.InDelta(t, 100, keys, 50, "windows that begin about %v", stretch)
	}
}
