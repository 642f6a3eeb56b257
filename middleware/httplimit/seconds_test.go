package httplimit

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit/adaptive"
)

// Waits are rounded up to seconds, so that a client that obeys is not refused again.
func TestSecondsAreRoundedUp(t *testing.T) {
	t.Parallel()
	for wait, want := range map[time.Duration]int64{-time.Second: 0, 0: 0, 1: 1, time.Second: 1, time.Second + 1: 2} {
		require.Equal(t, want, seconds(wait), wait)
	}
}

// A 429 is throttled, and so is a 503 that states a wait. Each wait is read as package internal/guard reads it.
func TestOutcomes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		status    int
		after     string
		throttled bool
		wait      time.Duration
	}{
		{200, "", false, 0},
		{500, "7", false, 0},
		{503, "", false, 0},
		{503, "0", true, 0},
		{503, "9", true, 9 * time.Second},
		{429, "", true, 0},
		{429, "soon", true, 0},
		{429, "7", true, 7 * time.Second},
	} {
		header := http.Header{}
		header.Set("Retry-After", c.after)
		got := OutcomeOf(&http.Response{StatusCode: c.status, Header: header})
		require.Equal(t, adaptive.Outcome{Throttled: c.throttled, RetryAfter: c.wait}, got, c)
	}
}
