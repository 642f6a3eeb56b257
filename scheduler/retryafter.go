package scheduler

import (
	"net/http"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/upstream"
)

// RetryAfter returns until when the response of an upstream asks to be left alone, and false when it does not: when it is
// neither a 429 nor a 503, or has no Retry-After that lies ahead. A date counts from the Date of the response where there
// is one, so that the upstream's clock need not agree with ours.
//
// now is the present on the clock that the answer is for; that of a pause is the database's. A wait longer than most is cut
// to it, since a limit that is paused for years by somebody else's mistake is one that somebody has to find; so is one that
// no number holds.
func RetryAfter(response *http.Response, now time.Time, most time.Duration) (until time.Time, ok bool) {
	if response.StatusCode != http.StatusTooManyRequests && response.StatusCode != http.StatusServiceUnavailable {
		return time.Time{}, false
	}
	wait, ok := upstream.Wait(response.Header, now)
	if !ok || wait <= 0 || most <= 0 {
		return time.Time{}, false
	}
	return now.Add(min(wait, most)), true
}
