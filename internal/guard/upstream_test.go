package guard_test

import (
	"math"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/guard"
)

// FuzzWait compares the parsed wait with the Retry-After: seconds, or a date relative to the Date of the response.
func FuzzWait(f *testing.F) {
	const date = "Sun, 06 Nov 1994 08:49:37 GMT"
	for _, stated := range []string{"", "0", " 120 ", "-1", "1.5", "1e3", "9223372036", "9223372037", strings.Repeat("9", 40), date, "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994", "soon"} {
		f.Add(stated, "", int64(784111777))
		f.Add(stated, date, int64(0))
	}
	f.Fuzz(func(t *testing.T, stated, date string, now int64) {
		header := http.Header{"Retry-After": {stated}, "Date": {date}}
		clock := time.Unix(now%1e11, 0)
		wait, ok := guard.UpstreamWait(header, clock)
		if !ok {
			require.Zero(t, wait)
			_, err := strconv.ParseUint(strings.TrimSpace(stated), 10, 64)
			require.Error(t, err, "a number of seconds can be read")
			return
		}
		if n, err := strconv.ParseUint(strings.TrimSpace(stated), 10, 33); err == nil {
			require.Equal(t, time.Duration(n)*time.Second, wait)
			return
		}
		if strings.Trim(strings.TrimSpace(stated), "0123456789") == "" {
			require.Greater(t, wait.Seconds(), float64(math.MaxUint32))
			return
		}
		if strings.Trim(strings.TrimSpace(stated), ".0123456789") == "" { // a fraction
			if n, err := strconv.ParseFloat(strings.TrimSpace(stated), 64); err == nil && n < 1e6 {
				require.InDelta(t, n, wait.Seconds(), 1e-6)
			}
			return
		}
		at, err := http.ParseTime(strings.TrimSpace(stated))
		require.NoError(t, err)
		if _, err := http.ParseTime(date); err == nil {
			later, _ := guard.UpstreamWait(header, clock.Add(time.Hour))
			require.Equal(t, wait, later, "the date of the response counts, and not our clock")
			return
		}
		if span := at.Unix() - clock.Unix(); span < math.MaxInt32 && span > math.MinInt32 {
			require.Equal(t, time.Duration(span)*time.Second, wait)
		}
	})
}
