package guard

import (
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// UpstreamWait returns the wait that Retry-After states: seconds, also with a fraction, as some APIs send them, or a
// date (RFC 9110, section 10.2.3), which counts from the Date of the response, if any. It returns false without a valid
// Retry-After. The wait may be below 0.
func UpstreamWait(header http.Header, now time.Time) (time.Duration, bool) {
	const longest = time.Duration(1<<63 - 1)
	stated := strings.TrimSpace(header.Get("Retry-After"))
	if whole, part, fraction := strings.Cut(stated, "."); isDigits(whole) && (!fraction || isDigits(part)) {
		seconds, err := strconv.ParseInt(whole, 10, 64)
		if err != nil || seconds >= int64(longest/time.Second) {
			return longest, true
		}
		nanos, _ := strconv.ParseInt((part + "000000000")[:9], 10, 64) // digits only
		return time.Duration(seconds)*time.Second + time.Duration(nanos), true
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

// longestWait bounds waits that are computed from seconds: longer ones count as a day anyway.
const longestWait = 365 * 24 * time.Hour

var windowOf = regexp.MustCompile(`;\s*t=([0-9]{1,9})(?:[;,\s]|$)`)

// UpstreamWindow returns the longest t of the items of the field RateLimit (draft-ietf-httpapi-ratelimit-headers), and
// 0 if there is none. A refusal lists the policies that refused, and t is the time until each of them allows the
// request.
func UpstreamWindow(header http.Header) (wait time.Duration) {
	for _, found := range windowOf.FindAllStringSubmatch(strings.Join(header.Values("RateLimit"), ","), -1) {
		seconds, _ := strconv.ParseInt(found[1], 10, 64) // up to 9 digits
		wait = max(wait, time.Duration(seconds)*time.Second)
	}
	return min(wait, longestWait)
}

// UntilReset returns the time until X-RateLimit-Reset, in seconds since 1970, by the Date of the response, if any. It
// returns 0 without one.
func UntilReset(header http.Header, now time.Time) time.Duration {
	stated := strings.TrimSpace(header.Get("X-RateLimit-Reset"))
	seconds, err := strconv.ParseInt(stated, 10, 64)
	if err != nil || !isDigits(stated) {
		return 0
	}
	if sent, err := http.ParseTime(header.Get("Date")); err == nil {
		now = sent
	}
	return min(max(time.Unix(seconds, 0).Sub(now), 0), longestWait)
}
