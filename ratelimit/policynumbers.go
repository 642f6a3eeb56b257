package ratelimit

import (
	"cmp"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// Spec are what all kinds of policy have in common.
type Spec struct {
	// Kind is the kind of policy, as MarshalPolicy writes it.
	Kind Kind
	// Capacity is the maximum number of tokens at once: the largest cost that Take accepts, or the number of slots.
	Capacity float64
	// Rate is the number of tokens that are added each Period. For a [SlidingWindow], it is the most in any Period. For a
	// [Concurrency], it is the number of slots.
	Rate float64
	// Period is the time in which Rate tokens are added: the length of a window, or of a lease. A month is 30 days, a
	// quarter 91 and a year 365.
	Period time.Duration
	// Resets is the length of a window of a [CalendarWindow]. It is empty for other kinds.
	Resets Calendar
	// MaxDebt is the maximum number of tokens that Reserve can owe.
	MaxDebt float64
	// Shards is the number of rows of a bucket.
	Shards int
}

// Spec returns the numbers of the limit's policy. The zero Limit has zero Spec.
func (l Limit) Spec() Spec {
	if l.isZero() {
		return Spec{}
	}
	d := l.definition()
	t := timesTokens(d.terms, float64(d.shards))
	n := Spec{
		Kind: kindOf(&t), Capacity: t.Capacity, Rate: t.Rate, MaxDebt: t.MaxOwed, Shards: d.shards,
		Period: time.Duration(float64(t.Step)*t.Steps) * time.Microsecond,
	}
	if p, ok := l.Policy().(CalendarWindow); ok {
		n.Resets = p.Resets
	}
	return n
}

// kindOf returns the name of the kind of policy that has the terms.
func kindOf(t *bucket.Terms) Kind {
	switch t.Kind.(type) {
	case bucket.Sliding:
		return KindSlidingWindow
	case bucket.Concurrent:
		return KindConcurrency
	}
	switch {
	case t.Windows != nil:
		return KindCalendarWindow
	case t.Step > 1: // windows of a microsecond are a token bucket
		return KindFixedWindow
	}
	return KindTokenBucket
}

// Scale returns the policy with its numbers of tokens multiplied by times. If a product is above or below what a policy
// can have, all numbers are multiplied by the nearest factor that is possible. Slots are rounded down, to at least 1. A
// capacity of 1 or more stays at least 1, and so does MaxReserved without a capacity, so that a request with the
// default cost is never an error.
func Scale(policy Policy, times float64) Policy {
	scaled := policy.scaled(times)
	if _, err := NewLimit("scaled", scaled); err != nil { // rounding at the edge of what a policy can have
		return policy
	}
	return scaled
}

// scaleTokens multiplies the numbers above 0 by the same factor: times, or the nearest factor that keeps all of them in
// range.
func scaleTokens(times float64, tokens ...*float64) {
	for _, t := range tokens {
		if *t > 0 {
			times = min(max(times, bucket.MinTokens / *t), bucket.MaxTokens / *t)
		}
	}
	for _, t := range tokens {
		if *t > 0 {
			*t = min(max(*t*times, bucket.MinTokens), bucket.MaxTokens)
		}
	}
}

// scaleSteps is scaleTokens for a policy with a rate and a capacity. The capacity does not fall below 1, nor does
// MaxReserved if only reservations get tokens.
func scaleSteps(times float64, rate, capacity, maxReserved *float64) {
	before, reserved := cmp.Or(*capacity, *rate), *maxReserved
	scaleTokens(times, rate, capacity, maxReserved)
	if least := min(before, 1); cmp.Or(*capacity, *rate) < least {
		*capacity = least
	}
	if *capacity == None {
		*maxReserved = max(*maxReserved, min(reserved, 1))
	}
}

// scaleRate is scaleTokens for a policy whose rate is its capacity, which does not fall below 1.
func scaleRate(times float64, rate *float64, others ...*float64) {
	least := min(*rate, 1)
	scaleTokens(times, append(others, rate)...)
	*rate = max(*rate, least)
}
