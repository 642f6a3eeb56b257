package rules

import (
	"cmp"
	"math"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// What a policy may say, as ratelimit.NewLimit checks it.
const (
	minTokens = 1e-9
	maxTokens = 1e12
	maxPeriod = 36525 * 24 * time.Hour
)

// maxSlots is the most that a ratelimit.Concurrency may have.
const maxSlots = 1000

// numbers are those of a policy of any kind.
type numbers struct {
	rate                  float64
	period                time.Duration // after which rate tokens have arrived for certain
	capacity, maxReserved float64
	shards                int
	window                bool // whether they may arrive at the end of it together
}

// numbersOf returns the numbers of a policy; ok is false of a kind that this package does not know.
func numbersOf(policy ratelimit.Policy) (n numbers, ok bool) {
	switch p := policy.(type) {
	case ratelimit.TokenBucket:
		n = numbers{rate: p.Rate, period: p.Period, capacity: p.Capacity, maxReserved: p.MaxReserved, shards: p.Shards}
	case ratelimit.FixedWindow:
		n = numbers{rate: p.Rate, period: p.Period, capacity: p.Capacity, maxReserved: p.MaxReserved, shards: p.Shards, window: true}
	case ratelimit.SlidingWindow:
		slice := p.Period / time.Duration(cmp.Or(p.Slices, defaultSlices))
		n = numbers{rate: p.Rate, period: p.Period + slice, window: true}
	case ratelimit.CalendarWindow:
		n = numbers{rate: p.Rate, period: longest(p.Resets) + ratelimit.Day, maxReserved: p.MaxReserved, window: true}
	case ratelimit.Concurrency:
		n = numbers{rate: float64(p.Most), period: cmp.Or(p.Lease, defaultLease), window: true}
	case ratelimit.Adaptive:
		return numbersOf(p.Contract)
	default:
		return numbers{}, false
	}
	switch n.capacity {
	case 0:
		n.capacity = n.rate
	case ratelimit.NoCapacity:
		n.capacity = 0
	}
	n.shards = max(n.shards, 1)
	return n, true
}

// longest returns how long a window of the calendar is at most, in days of 24 hours. Where clocks change it may be a day
// longer.
func longest(c ratelimit.Calendar) time.Duration {
	switch c {
	case ratelimit.Daily:
		return ratelimit.Day
	case ratelimit.Weekly:
		return ratelimit.Week
	case ratelimit.Monthly:
		return 31 * ratelimit.Day
	case ratelimit.Quarterly:
		return 92 * ratelimit.Day
	case ratelimit.Yearly:
		return 366 * ratelimit.Day
	}
	return maxPeriod - ratelimit.Day
}

// speed returns the tokens that arrive in a nanosecond.
func speed(policy ratelimit.Policy) float64 {
	n, ok := numbersOf(policy)
	if !ok {
		return math.Inf(1)
	}
	return n.rate / float64(n.period)
}

// scale returns the policy with so many times the tokens, or as many as a policy may name. Slots are whole: of part of one
// nothing is left, and one there is always.
func scale(policy ratelimit.Policy, times float64) ratelimit.Policy {
	scaled := policy
	switch p := policy.(type) {
	case ratelimit.TokenBucket:
		scaleTokens(times, &p.Rate, &p.Capacity, &p.MaxReserved)
		scaled = p
	case ratelimit.FixedWindow:
		scaleTokens(times, &p.Rate, &p.Capacity, &p.MaxReserved)
		scaled = p
	case ratelimit.SlidingWindow:
		scaleTokens(times, &p.Rate)
		scaled = p
	case ratelimit.CalendarWindow:
		scaleTokens(times, &p.Rate, &p.MaxReserved)
		scaled = p
	case ratelimit.Concurrency:
		p.Most = int(min(max(math.Floor(float64(p.Most)*times), 1), maxSlots))
		return p
	case ratelimit.Adaptive:
		p.Contract = scale(p.Contract, times)
		return p
	}
	return orElse(scaled, policy)
}

// scaleTokens multiplies the numbers that are above 0 by the same factor: times, or as near to it as leaves all of them
// within what a policy may name.
func scaleTokens(times float64, tokens ...*float64) {
	for _, t := range tokens {
		if *t > 0 {
			times = min(max(times, minTokens / *t), maxTokens / *t)
		}
	}
	for _, t := range tokens {
		if *t > 0 {
			*t = min(max(*t*times, minTokens), maxTokens)
		}
	}
}

// orElse returns the scaled policy, and at the edge of the arithmetic, where its rounding makes it one that cannot be, the
// policy as it was.
func orElse(scaled, policy ratelimit.Policy) ratelimit.Policy {
	if _, err := ratelimit.NewLimit("scaled", scaled); err != nil {
		return policy
	}
	return scaled
}
