package scheduler_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/scheduler"
)

func TestRetryAfter(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, time.March, 9, 10, 0, 0, 0, time.UTC)
	const most = time.Hour
	for name, c := range map[string]struct {
		status int
		after  string
		date   string
		wait   time.Duration // 0: it requests no pause
	}{
		"Seconds":           {429, "30", "", 30 * time.Second},
		"SecondsWithSpaces": {429, " 30 ", "", 30 * time.Second},
		"Unavailable":       {503, "30", "", 30 * time.Second},
		"AtMost":            {429, "3601", "", most},
		"MoreThanANumber":   {429, "99999999999999999999999", "", most},
		"MoreThanASpan":     {429, "9223372037", "", most},
		"AtOnce":            {429, "0", "", 0},
		"Date":              {429, "Mon, 09 Mar 2026 10:00:30 GMT", "", 30 * time.Second},
		"DateOfRFC850":      {429, "Monday, 09-Mar-26 10:00:30 GMT", "", 30 * time.Second},
		"DateOfASCTime":     {429, "Mon Mar  9 10:00:30 2026", "", 30 * time.Second},
		"DateOnItsOwnClock": {429, "Mon, 09 Mar 2026 12:00:30 GMT", "Mon, 09 Mar 2026 12:00:00 GMT", 30 * time.Second},
		"DateFarAhead":      {429, "Fri, 31 Dec 9999 23:59:59 GMT", "", most},
		"DateInThePast":     {429, "Mon, 09 Mar 2026 09:59:59 GMT", "", 0},
		"BadDateBeside":     {429, "Mon, 09 Mar 2026 10:00:30 GMT", "yesterday", 30 * time.Second},
		"None":              {429, "", "", 0},
		"Fraction":          {429, "2.0", "", 0},
		"BelowZero":         {429, "-30", "", 0},
		"Signed":            {429, "+30", "", 0},
		"NoDigits":          {429, "٣٠", "", 0},
		"Gibberish":         {429, "soon", "", 0},
		"AnotherStatus":     {500, "30", "", 0},
		"Moved":             {301, "30", "", 0},
		"Accepted":          {200, "30", "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			header := http.Header{}
			header.Set("Retry-After", c.after)
			header.Set("Date", c.date)
			until, ok := scheduler.RetryAfter(&http.Response{StatusCode: c.status, Header: header}, now, most)
			require.Equal(t, c.wait > 0, ok)
			if ok {
				require.Equal(t, now.Add(c.wait), until)
			}
		})
	}
	_, ok := scheduler.RetryAfter(&http.Response{StatusCode: http.StatusTooManyRequests, Header: http.Header{"Retry-After": {"30"}}}, now, 0)
	require.False(t, ok, "no wait is allowed")
}
