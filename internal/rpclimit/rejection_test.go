package rpclimit_test

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/rpclimit"
)

// A wait is never told too short.
func TestRounding(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		wait            time.Duration
		millis, seconds string
	}{
		{time.Microsecond, "1", "1"},
		{time.Millisecond, "1", "1"},
		{time.Millisecond + time.Microsecond, "2", "1"},
		{time.Second, "1000", "1"},
		{time.Second + time.Microsecond, "1001", "2"},
		{24 * time.Hour, "86400000", "86400"},
		{30 * 24 * time.Hour, "2147483647", "2592000"},
		{math.MaxInt64 - time.Second, "2147483647", "9223372036"},
	} {
		r := rpclimit.RejectionError{RetryAfter: c.wait}
		require.Equal(t, c.millis, r.PushbackMillis(), c.wait)
		require.Equal(t, c.seconds, r.RetryAfterSeconds(), c.wait)
	}
}
