// Package upstream reads what the responses of others say of how often they want to be asked.
package upstream

import (
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Wait returns the wait that Retry-After states: whole seconds, or a date (RFC 9110, section 10.2.3), which counts from the Date of
// the response, if any. It returns false without a valid Retry-After. The wait may be below 0.
func Wait(header http.Header, now time.Time) (time.Duration, bool) {
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
