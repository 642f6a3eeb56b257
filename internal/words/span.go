package words

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// maxSpan is the longest span that ParseSpan returns: about 109 years.
const maxSpan = 40_000 * 24 * time.Hour

var (
	errSpan     = errors.New("write a duration such as 90s, 10m, 1h30m, 7d, 2w, minute, hour, day or week")
	errLongSpan = errors.New("write a duration of up to 40000 days")
)

// ParseSpan returns the span of time that text names: a word such as minute, a number of them such as 7d or 7 days, or
// a duration of package time. It returns an error that says what to write if there is no such span, or if it is not
// above 0.
func ParseSpan(text string) (time.Duration, error) {
	for _, unit := range units() {
		if text == unit.word {
			return unit.span, nil
		}
	}
	for _, unit := range units() {
		if count, ok := strings.CutSuffix(text, unit.word[:1]); ok && unit.span > time.Hour {
			n, err := strconv.ParseFloat(count, 64)
			if err != nil {
				return 0, errSpan
			}
			return checked(math.Round(n * float64(unit.span)))
		}
		if count, ok := strings.CutSuffix(text, " "+unit.word+"s"); ok {
			n, err := strconv.ParseUint(count, 10, 32)
			if err != nil {
				return 0, errSpan
			}
			return checked(float64(n) * float64(unit.span))
		}
	}
	switch text {
	case "month", "quarter", "year":
		return 0, fmt.Errorf("a %s has no fixed length; write it in days, or use a calendar window that resets each %s", text,
			text)
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		return 0, errSpan
	}
	return checked(d)
}

// checked returns a span of that many nanoseconds if it is in range.
func checked[N float64 | time.Duration](ns N) (time.Duration, error) {
	switch {
	case !(ns >= 1): // NaN, too
		return 0, errSpan
	case ns > N(maxSpan):
		return 0, errLongSpan
	}
	return time.Duration(ns), nil
}
