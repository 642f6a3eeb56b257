package main

import (
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// What the upstream allows in any minute, and the most one request may take of it.
const (
	upstreamRequests = 200
	upstreamTokens   = 200_000
	largestRequest   = 5_000
)

// scale is how fast a run goes, and how much of the upstream it means to use.
type scale struct {
	minute  time.Duration // what a minute of the upstream lasts: time runs faster here
	share   float64       // of what the upstream allows, that our limits hand out
	prompts float64       // how many of the prompts are asked
}

// demoScale is that of the program: a minute lasts 18 seconds.
func demoScale() scale {
	return scale{minute: 18 * time.Second, share: 0.94, prompts: 1}
}

// slack is how late work may reach the upstream and still never be too much for it. Reserved work of our
// limits comes to share*(minute + late) in any minute, plus the one request that its beginning may cut off
// from the tokens that were saved for it:
//
//	share * (minute + slack) / minute + largestRequest / upstreamTokens = 1
func (s scale) slack() time.Duration {
	return time.Duration(float64(s.minute) * ((1-float64(largestRequest)/upstreamTokens)/s.share - 1))
}

// staleAfter is how late work may start on its slot.
func (s scale) staleAfter() time.Duration { return s.slack() * 3 / 4 }

// way is what is left of the slack for the way from there to the upstream.
func (s scale) way() time.Duration { return s.slack() - s.staleAfter() }

// limits are all limits of the backend.
type limits struct {
	// What the upstream takes of us. Whatever is asked is reserved and waits its turn, and no capacity is kept
	// in store: one that was saved up would come on top of what arrives in the minute it is spent in.
	requests, tokens ratelimit.Limit

	plans map[string]plan
}

// plan is what its users may ask, each and together.
type plan struct {
	userRequests, userTokens ratelimit.Limit
	requests, tokens         ratelimit.Limit

	// How many questions of a user the upstream has at a time, however many are due: who asks much at once must not have
	// all of the workers.
	atOnce ratelimit.Limit
}

func newLimits(s scale) limits {
	upstream := func(name string, perMinute float64) ratelimit.Limit {
		return ratelimit.Define(name, ratelimit.TokenBucket{Rate: s.share * perMinute, Period: s.minute, Capacity: ratelimit.NoCapacity})
	}
	// A user and a plan are refused what they do not have. It is the upstream's limits alone that put work off:
	// work that a user's limit put off as well would meet, later, the full rate of what others reserved.
	allowance := func(name string, perMinute, capacity float64) ratelimit.Limit {
		return ratelimit.Define(name, ratelimit.TokenBucket{Rate: perMinute, Period: s.minute, Capacity: capacity, MaxReserved: ratelimit.NoDebt})
	}
	// A worker that dies has its slots for as long as the lease; one that works on renews it.
	slots := func(name string, most int) ratelimit.Limit {
		return ratelimit.Define(name, ratelimit.Concurrency{Most: most, Lease: 10 * time.Second})
	}
	return limits{
		requests: upstream("upstream.requests", upstreamRequests),
		tokens:   upstream("upstream.tokens", upstreamTokens),
		plans: map[string]plan{
			"free": {
				userRequests: allowance("free.user.requests", 60, 8), userTokens: allowance("free.user.tokens", 40_000, 20_000),
				requests: allowance("free.requests", 120, 40), tokens: allowance("free.tokens", 80_000, 40_000),
				atOnce: slots("free.user.atOnce", 2),
			},
			"pro": {
				userRequests: allowance("pro.user.requests", 120, 20), userTokens: allowance("pro.user.tokens", 90_000, 45_000),
				requests: allowance("pro.requests", 180, 60), tokens: allowance("pro.tokens", 190_000, 95_000),
				atOnce: slots("pro.user.atOnce", 4),
			},
		},
	}
}

// estimate is what a completion is expected to cost: four bytes of the prompt make a token, and the answer
// is as long as it may be.
func estimate(prompt string, maxTokens int) int {
	return (len(prompt)+3)/4 + maxTokens
}
