package scheduler

import (
	"net/http"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/guard"
)

// RetryAfter returns the time until which the upstream asks for no requests, and false if the response is neither a 429
// nor a 503, or has no Retry-After in the future. A date counts from the response's Date, if it has one, so the
// upstream's clock needn't agree with ours.
//
// now is the present on the result's clock; for a pause that is the database's. A wait that is longer than most, or out
// of range, becomes most, so an upstream's mistake doesn't pause a limit for years.
func RetryAfter(response *http.Response, now time.Time, most time.Duration) (until time.Time, ok bool) {
	if response.StatusCode != http.StatusTooManyRequests && response.StatusCode != http.StatusServiceUnavailable {
		return time.Time{}, false
	}
	wait, ok := guard.UpstreamWait(response.Header, now)
	if !ok || wait <= 0 || most <= 0 {
		return time.Time{}, false
	}
	return now.Add(min(wait, most)), true
}
