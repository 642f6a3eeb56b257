package scheduler_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/scheduler"
)

// TestRetryAfter promises the bounds of a wait. FuzzWait of internal/upstream checks how a wait is read.
func TestRetryAfter(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, time.March, 9, 10, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		status      int
		after, date string
		most, wait  time.Duration // a wait of 0 requests no pause
	}{
		{429, "30", "", time.Hour, 30 * time.Second},
		{503, " 30 ", "", time.Hour, 30 * time.Second},
		{429, "3601", "", time.Hour, time.Hour},
		{429, "99999999999999999999999", "", time.Hour, time.Hour},
		{429, "Fri, 31 Dec 9999 23:59:59 GMT", "", time.Hour, time.Hour},
		{429, "Mon, 09 Mar 2026 12:00:30 GMT", "Mon, 09 Mar 2026 12:00:00 GMT", time.Hour, 30 * time.Second},
		{429, "Mon, 09 Mar 2026 09:59:59 GMT", "", time.Hour, 0},
		{429, "0", "", time.Hour, 0},
		{429, "", "", time.Hour, 0},
		{429, "٣٠", "", time.Hour, 0},
		{429, "+30", "", time.Hour, 0},
		{500, "30", "", time.Hour, 0},
		{200, "30", "", time.Hour, 0},
		{429, "30", "", 0, 0},
	} {
		header := http.Header{}
		header.Set("Retry-After", c.after)
		header.Set("Date", c.date)
		until, ok := scheduler.RetryAfter(&http.Response{StatusCode: c.status, Header: header}, now, c.most)
		require.Equal(t, c.wait > 0, ok, c)
		if ok {
			require.Equal(t, now.Add(c.wait), until, c)
		}
	}
}
