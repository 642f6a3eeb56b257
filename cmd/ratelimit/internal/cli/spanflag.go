package cli

import (
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/words"
)

// spanFlag is a flag for a span of time: 10m, 1h30m, 7d, 2w, or minute, hour, day, week.
type spanFlag time.Duration

// String returns the value for a help text.
func (s *spanFlag) String() string {
	if *s == 0 {
		return ""
	}
	return words.Period(time.Duration(*s))
}

// Type is what a help text calls the value.
func (s *spanFlag) Type() string { return "duration" }

// Set reads the value.
func (s *spanFlag) Set(text string) error {
	d, err := words.ParseSpan(text)
	*s = spanFlag(d)
	return err
}

// instantFlag is a flag for an instant, as RFC 3339 writes it.
type instantFlag struct{ at time.Time }

// String returns the value for a help text.
func (f *instantFlag) String() string {
	if f.at.IsZero() {
		return ""
	}
	return f.at.Format(time.RFC3339)
}

// Type is what a help text calls the value.
func (f *instantFlag) Type() string { return "time" }

// Set reads the value.
func (f *instantFlag) Set(text string) error {
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return fmt.Errorf("use a time with its zone, such as 2026-12-31T18:00:00Z or 2026-12-31T18:00:00+01:00")
	}
	f.at = at
	return nil
}
