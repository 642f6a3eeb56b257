package httplimit

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Waits are rounded up to seconds, so that a client that obeys is not refused again.
func TestSecondsAreRoundedUp(t *testing.T) {
	t.Parallel()
	for wait, want := range map[time.Duration]int64{-time.Second: 0, 0: 0, 1: 1, time.Second: 1, time.Second + 1: 2} {
		require.Equal(t, want, seconds(wait), wait)
	}
}
