package rules

import (
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

// numbers are those of a policy of either kind.
type numbers struct {
	rate                  float64
	period                time.Duration
	capacity, maxReserved float64
	shards                int
	window                bool
}

// numbersOf returns the numbers of a policy; ok is false of a kind that this package does not know.
func numbersOf(policy ratelimit.Policy) (n numbers, ok bool) {
	switch p := policy.(type) {
	case *ratelimit.TokenBucket:
		return numbersOf(*p)
	case *ratelimit.FixedWindow:
		return numbersOf(*p)
	case ratelimit.TokenBucket:
		n = numbers{rate: p.Rate, period: p.Period, capacity: p.Capacity, maxReserved: p.MaxReserved, shards: p.Shards}
	case ratelimit.FixedWindow:
		n = numbers{rate: p.Rate, period: p.Period, capacity: p.Capacity, maxReserved: p.MaxReserved, shards: p.Shards, window: true}
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

// speed returns the tokens that arrive in a nanosecond.
func speed(policy ratelimit.Policy) float64 {
	n, ok := numbersOf(policy)
	if !ok {
		return math.Inf(1)
	}
	return n.rate / float64(n.period)
}

// scale returns the policy with so many times the tokens, or as many as a policy may name.
func scale(policy ratelimit.Policy, times float64) ratelimit.Policy {
	switch p := policy.(type) {
	case *ratelimit.TokenBucket:
		return scale(*p, times)
	case *ratelimit.FixedWindow:
		return scale(*p, times)
	case ratelimit.TokenBucket:
		scaled := p
		scaleTokens(times, &scaled.Rate, &scaled.Capacity, &scaled.MaxReserved)
		return orElse(scaled, p)
	case ratelimit.FixedWindow:
		scaled := p
		scaleTokens(times, &scaled.Rate, &scaled.Capacity, &scaled.MaxReserved)
		return orElse(scaled, p)
	}
	return policy
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
