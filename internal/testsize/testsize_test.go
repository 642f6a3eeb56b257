package testsize

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// This test is not parallel: it sets an environment variable.
func TestSeeds(t *testing.T) {
	if *seedFlag != 0 {
		t.Skip("this test needs a run without -seed")
	}
	now := time.Date(2026, 11, 23, 23, 0, 0, 0, time.UTC)
	fresh := func() uint64 { return 7 }

	t.Setenv(nightlyVariable, "")
	require.EqualValues(t, 20261123, one(now, fresh))
	if testing.Short() {
		require.Equal(t, []uint64{1, 20261123}, seeds(now, fresh))
		return
	}
	require.Equal(t, []uint64{1, 2, 20261123}, seeds(now, fresh))

	t.Setenv(nightlyVariable, "1")
	require.EqualValues(t, 7, one(now, fresh), "a nightly run draws a new seed")
	require.Len(t, seeds(now, fresh), 32)
	require.Equal(t, []uint64{1, 2, 7}, seeds(now, fresh)[:3])
}
