// Package words writes rates and spans of time as people do: 60 per minute, and not 60 per 1m0s. All texts of policies
// for people use it: the String methods of ratelimit, the answers of httplimit, the command line and the pages.
package words

import (
	"strconv"
	"strings"
	"time"
)

// unit is a span that has a word of its own.
type unit struct {
	word string
	span time.Duration
}

func units() []unit {
	const day = 24 * time.Hour
	return []unit{{"week", 7 * day}, {"day", day}, {"hour", time.Hour}, {"minute", time.Minute}, {"second", time.Second}}
}

// Rate returns how many tokens arrive in a period: "60 per minute", "5 per 30 seconds".
func Rate(tokens float64, period time.Duration) string {
	return Number(tokens) + " per " + Period(period)
}

// InAny returns how many tokens there are in a period wherever it begins: "100 in any minute".
func InAny(tokens float64, period time.Duration) string {
	return Number(tokens) + " in any " + Period(period)
}

// Number returns all digits of a number, without an exponent.
func Number(n float64) string { return strconv.FormatFloat(n, 'f', -1, 64) }

// Period returns a span as people say it behind "per": minute, 7 days, 90 seconds, 1.5s. The unit is the largest of
// which it is a whole number.
func Period(d time.Duration) string {
	for _, unit := range units() {
		if d == unit.span {
			return unit.word
		}
		if d > unit.span && d%unit.span == 0 {
			return strconv.FormatInt(int64(d/unit.span), 10) + " " + unit.word + "s"
		}
	}
	return d.String()
}

// Span returns a span of time as short as it goes: "1m" rather than "1m0s".
func Span(d time.Duration) string {
	text := d.String()
	for _, end := range []string{"m0s", "h0m"} {
		if strings.HasSuffix(text, end) {
			text = text[:len(text)-2]
		}
	}
	return text
}

// Wait returns a wait that is never too short: up to the next millisecond, as short as it goes.
func Wait(d time.Duration) string {
	if rest := d % time.Millisecond; rest > 0 && d < 1<<63-1-time.Millisecond {
		d += time.Millisecond - rest
	}
	return Span(d)
}
