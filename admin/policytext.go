package admin

import (
	"fmt"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/words"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// policyWords returns how tokens arrive, in words, as in "10 per minute, capacity 3".
func policyWords(limit ratelimit.Limit) string {
	r := rules.FromLimit(limit).WithDefaults()
	if r.Rate == 0 && r.Most == 0 {
		return "not known"
	}
	text := ""
	switch r.Kind {
	case rules.SlidingWindow:
		text = "never more than " + number(r.Rate) + " in any " + words.Period(r.Period)
	case rules.CalendarWindow:
		text = number(r.Rate) + " per " + windows(r)
	case rules.Concurrency:
		text = whole(r.Most) + " at a time, each for " + span(r.Lease) + " without renewal"
	case rules.TokenBucket, rules.FixedWindow:
		text = number(r.Rate) + " per " + words.Period(r.Period) + ", capacity " + number(max(limit.Capacity(), 0))
	}
	if r.Kind == rules.FixedWindow {
		text += ", in fixed windows"
	}
	if r.Shards > 1 {
		text += fmt.Sprintf(", on %d rows", r.Shards)
	}
	if r.Adaptive != nil {
		text += ", " + price(r)
	}
	return text
}

// windows returns when the windows of a calendar begin: "week of Europe/Berlin, from Monday on".
func windows(r rules.Rule) string {
	switch r.Resets {
	case ratelimit.Daily:
		return "day of " + r.Zone
	case ratelimit.Weekly:
		return "week of " + r.Zone + ", from " + r.FirstWeekday.String() + " on"
	case ratelimit.Monthly:
		return fmt.Sprintf("month of %s, from day %d on", r.Zone, r.FirstDay)
	case ratelimit.Quarterly, ratelimit.Yearly:
		return fmt.Sprintf("%s of %s, from %d %s on", r.Resets, r.Zone, r.FirstDay, r.FirstMonth)
	}
	return "none"
}

// price returns how the price of a token follows an upstream.
func price(r rules.Rule) string {
	a := r.Adaptive
	if a == nil {
		return "1"
	}
	parts := []string{
		"adapting down to " + number(100*a.Floor) + "%", number(100*a.Growth) + "% back each second", "every " + span(a.Epoch),
	}
	if !a.Apply {
		parts = append(parts, "not charged")
	}
	return strings.Join(parts, ", ")
}

// orNone returns a count, and none for 0.
func orNone(n int) string {
	if n == 0 {
		return "none"
	}
	return whole(n)
}

// leaseText returns how long a lease is, and none for 0.
func leaseText(d time.Duration) string {
	if d == 0 {
		return "none"
	}
	return span(d)
}
