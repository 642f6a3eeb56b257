package cli

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/words"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// spanFlag is a flag for a span of time: 10m, 1h30m, 7d, 2w, or minute, hour, day, week.
type spanFlag time.Duration

// String is the value as it is shown in a help text.
func (s *spanFlag) String() string {
	if *s == 0 {
		return ""
	}
	return words.Period(time.Duration(*s))
}

// Type is what a help text calls the value.
func (s *spanFlag) Type() string { return "span" }

// Set reads the value.
func (s *spanFlag) Set(text string) error {
	d, err := parseSpan(text)
	if err == nil && d <= 0 {
		err = fmt.Errorf("use a span above 0")
	}
	*s = spanFlag(d)
	return err
}

// maxSpan is how long a span may be: about 109 years.
const maxSpan = 40_000 * ratelimit.Day

var (
	errSpan     = errors.New("use a span such as 90s, 10m, 1h30m, 7d, 2w, minute, hour, day or week")
	errLongSpan = errors.New("use up to 40000 days")
)

func parseSpan(text string) (time.Duration, error) {
	for _, unit := range units() {
		if text == unit.word {
			return unit.span, nil
		}
	}
	for suffix, unit := range map[string]time.Duration{"d": ratelimit.Day, "w": ratelimit.Week} {
		if count, ok := strings.CutSuffix(text, suffix); ok {
			n, err := strconv.ParseFloat(count, 64)
			switch span := n * float64(unit); {
			case err != nil || math.IsNaN(n):
				return 0, errSpan
			case span > float64(maxSpan):
				return 0, errLongSpan
			case span < 0:
				return -1, nil
			default:
				return time.Duration(span), nil
			}
		}
	}
	d, err := time.ParseDuration(text)
	switch {
	case err != nil:
		return 0, errSpan
	case d > maxSpan:
		return 0, errLongSpan
	}
	return d, nil
}

type unit struct {
	word string
	span time.Duration
}

func units() []unit {
	return []unit{{"week", ratelimit.Week}, {"day", ratelimit.Day}, {"hour", time.Hour}, {"minute", time.Minute}, {"second", time.Second}}
}

// instantFlag is a flag for an instant, as RFC 3339 writes it.
type instantFlag struct{ at time.Time }

// String is the value as it is shown in a help text.
func (f *instantFlag) String() string {
	if f.at.IsZero() {
		return ""
	}
	return f.at.Format(time.RFC3339)
}

// Type is what a help text calls the value.
func (f *instantFlag) Type() string { return "instant" }

// Set reads the value.
func (f *instantFlag) Set(text string) error {
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return fmt.Errorf("use an instant with its zone, such as 2026-12-31T18:00:00Z or 2026-12-31T18:00:00+01:00")
	}
	f.at = at
	return nil
}
