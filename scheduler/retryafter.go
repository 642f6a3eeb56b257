package scheduler

import (
	"net/http"
	"strconv"
	"strings"
	"time"
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
	wait, ok := waitOf(response.Header, now)
	if !ok || wait <= 0 || most <= 0 {
		return time.Time{}, false
	}
	return now.Add(min(wait, most)), true
}

// waitOf returns the wait that Retry-After states: whole seconds, or a date (RFC 9110, section 10.2.3).
func waitOf(header http.Header, now time.Time) (time.Duration, bool) {
	const longest = time.Duration(1<<63 - 1)
	stated := strings.TrimSpace(header.Get("Retry-After"))
	if isDigits(stated) {
		seconds, err := strconv.ParseInt(stated, 10, 64)
		if err != nil || seconds > int64(longest/time.Second) {
			return longest, true
		}
		return time.Duration(seconds) * time.Second, true
	}
	at, err := http.ParseTime(stated)
	if err != nil {
		return 0, false
	}
	if sent, err := http.ParseTime(header.Get("Date")); err == nil {
		now = sent
	}
	return at.Sub(now), true
}

func isDigits(s string) bool {
	return s != "" && strings.Trim(s, "0123456789") == ""
}
