// Package policytext reads a policy in the words that its String method prints: "10 per minute, capacity 50".
package policytext

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/words"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Examples are policies of all kinds, for help texts and errors.
const Examples = `10 per minute, capacity 50
100 per hour (fixed window)
never more than 100 in any minute
1000 per month in Europe/Berlin
5 at a time, leases of 30s`

var errNoPolicy = errors.New(`this is no policy; write one as "` + strings.ReplaceAll(Examples, "\n", `", "`) + `"`)

// The forms of a policy. A form of a kind is followed by what several kinds have.
var (
	tokens = regexp.MustCompile(form(`NUM per SPAN(?:, (no capacity)|, capacity NUM)?( \(fixed window(?:, one starts at (\S+))?\))?` +
		owed + `(?:, NAT shards)?`))
	sliding  = regexp.MustCompile(form(`never more than NUM in any SPAN(?:, counted in NAT slices)?`))
	calendar = regexp.MustCompile(form(`NUM per (day|week|month|quarter|year) in (\S+)(?: from (?:(\w+day)|day NAT|(\w+) NAT) on)?` + owed))
	slots    = regexp.MustCompile(form(`NAT at a time(?:, leases of (\S+))?`))
)

const owed = `(?:, up to NUM owed|, (no reservations))?`

// form returns the pattern of a whole text, in which NUM is a number, NAT a whole number, and SPAN a period.
func form(pattern string) string {
	return "^" + strings.NewReplacer(
		"NUM", `([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)`, "NAT", `([0-9]{1,9})`, "SPAN",
		`([a-z]+|[0-9]+ [a-z]+|[0-9][0-9a-zµ.]*)`,
	).Replace(pattern) + "$"
}

// Parse returns the policy whose String method prints text. A period may also be a span such as 90s or 7d. Parse does
// not check the numbers, as ratelimit.NewLimit does.
func Parse(text string) (ratelimit.Policy, error) {
	r := &reader{}
	policy := r.policy(text)
	if r.err != nil {
		return nil, fmt.Errorf("%.200q: %w", text, r.err)
	}
	return policy, nil
}

// reader converts the parts of a text, and keeps the first error.
type reader struct{ err error }

func (r *reader) policy(text string) ratelimit.Policy {
	if m := sliding.FindStringSubmatch(text); m != nil {
		return ratelimit.SlidingWindow{Rate: r.number(m[1]), Period: r.span(m[2]), Slices: r.whole(m[3])}
	}
	if m := slots.FindStringSubmatch(text); m != nil {
		return ratelimit.Concurrency{Slots: r.whole(m[1]), Lease: r.span(m[2])}
	}
	if m := calendar.FindStringSubmatch(text); m != nil {
		return r.calendar(m)
	}
	m := tokens.FindStringSubmatch(text)
	if m == nil {
		r.fail(errNoPolicy)
		return nil
	}
	b := ratelimit.TokenBucket{
		Rate: r.number(m[1]), Period: r.span(m[2]), Capacity: r.number(m[4]), MaxReserved: r.owed(m[7], m[8]),
		Shards: r.whole(m[9]),
	}
	if m[3] != "" {
		b.Capacity = ratelimit.None
	}
	if m[5] == "" {
		return b
	}
	return ratelimit.FixedWindow{
		Rate: b.Rate, Period: b.Period, Capacity: b.Capacity, MaxReserved: b.MaxReserved, Shards: b.Shards,
		Start: r.instant(m[6]),
	}
}

func (r *reader) calendar(m []string) ratelimit.Policy {
	w := ratelimit.CalendarWindow{
		Rate: r.number(m[1]), Resets: ratelimit.Calendar(m[2]), Zone: m[3], FirstDay: r.whole(m[5] + m[7]),
		MaxReserved: r.owed(m[8], m[9]),
	}
	if m[4] != "" {
		w.FirstWeekday = named(r, m[4], time.Sunday, time.Saturday)
	}
	if m[6] != "" {
		w.FirstMonth = named(r, m[6], time.January, time.December)
	}
	return w
}

// named returns the value from first to last whose String method prints name.
func named[T interface {
	~int
	fmt.Stringer
}](r *reader, name string, first, last T) T {
	for v := first; v <= last; v++ {
		if v.String() == name {
			return v
		}
	}
	r.fail(fmt.Errorf("there is no %q; write one from %v to %v", name, first, last))
	return first
}

func (r *reader) fail(err error) {
	if r.err == nil {
		r.err = err
	}
}

// number returns the number that text says, and 0 if it is empty.
func (r *reader) number(text string) float64 {
	if text == "" {
		return 0
	}
	n, err := strconv.ParseFloat(text, 64)
	if err != nil {
		r.fail(fmt.Errorf("the number %s is too large", text))
	}
	return n
}

func (r *reader) whole(text string) int { return int(r.number(text)) }

// owed returns a MaxReserved: 0 for no bound.
func (r *reader) owed(most, none string) float64 {
	n := r.number(most)
	switch {
	case none != "":
		return ratelimit.NoReservations
	case most != "" && n == 0:
		return ratelimit.None
	}
	return n
}

func (r *reader) span(text string) time.Duration {
	if text == "" {
		return 0
	}
	d, err := words.ParseSpan(text)
	if err != nil {
		r.fail(err)
	}
	return d
}

func (r *reader) instant(text string) time.Time {
	if text == "" {
		return time.Time{}
	}
	at, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		r.fail(fmt.Errorf("%.40q is no instant; write it as 2026-12-31T18:00:00Z", text))
	}
	return at
}
