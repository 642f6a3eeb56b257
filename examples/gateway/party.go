package main

import (
	"crypto/rand"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// party is some clients who ask alike, all at once. Each has a bucket of the limit that stops them to
// himself, or they share one.
type party struct {
	who     string
	buckets int
	asks    int // of each bucket
	cost    int // of each ask, to the limit that stops them
	tier    ratelimit.Limit
	plan    ratelimit.Limit // the zero Limit when they have none
	request func(r *http.Request, bucket, i int)

	left, leftToday int // in each bucket
}

// behindProxy is the header that our proxy sets: what the client wrote, and then where it really is.
func behindProxy(r *http.Request, address string, forged ...string) {
	for _, line := range forged {
		r.Header.Add("X-Forwarded-For", line)
	}
	r.Header.Add("X-Forwarded-For", address)
}

func withKey(r *http.Request, key string) { r.Header.Set("Authorization", "Bearer "+key) }

// registered returns who has an API key in the demo: a key is a name and "-key".
func registered() customers {
	c := customers{}
	for plan, names := range map[string]int{planFree: 4, planPro: 19} {
		for i := range names {
			name := fmt.Sprintf("%s%d", plan, i)
			c.add(name+"-key", customer{name, plan})
		}
	}
	return c
}

// honest returns the clients who are who they say, or say nothing.
func honest() []*party {
	return []*party{
		{
			who: "4 keys on the free plan", buckets: 4, asks: 100, cost: 1, tier: perFree, plan: perFree,
			request: func(r *http.Request, bucket, _ int) {
				behindProxy(r, fmt.Sprintf("192.0.2.%d", bucket))
				withKey(r, fmt.Sprintf("free%d-key", bucket))
			},
		}, {
			who: "2 keys on the pro plan, 10 tokens a request", buckets: 2, asks: 100, cost: 10, tier: perPro, plan: perPro,
			request: func(r *http.Request, bucket, _ int) {
				behindProxy(r, fmt.Sprintf("192.0.2.%d", 10+bucket))
				withKey(r, fmt.Sprintf("pro%d-key", bucket))
				r.Header.Set(costHeader, "10")
			},
		}, {
			who: "4 visitors without a key", buckets: 4, asks: 80, cost: 1, tier: perFree, plan: perFree,
			request: func(r *http.Request, bucket, _ int) { behindProxy(r, fmt.Sprintf("192.0.2.%d", 20+bucket)) },
		}, {
			who: "3 pro keys in an office with one address", buckets: 1, asks: 180, cost: 1, tier: perAddress, plan: perPro,
			request: func(r *http.Request, _, i int) {
				behindProxy(r, "198.51.100.1")
				withKey(r, fmt.Sprintf("pro%d-key", 2+i%3))
			},
		},
	}
}

// dishonest returns the clients who try to get more than one bucket, or more out of it.
func dishonest() []*party {
	return []*party{
		{
			who: "a visitor who forges addresses and cookies", buckets: 1, asks: 150, cost: 1, tier: perFree, plan: perFree,
			request: func(r *http.Request, _, i int) {
				forged := fmt.Sprintf("10.%d.%d.%d", i%3, i%5, i)
				behindProxy(r, "203.0.113.1", [][]string{{forged}, {forged + ", garbage", "::1"}, {"127.0.0.1, 192.0.2.1"}}[i%3]...)
				r.Header.Set("Cookie", "__Host-visitor="+rand.Text())
			},
		}, {
			who: "a visitor who has 2^64 addresses of IPv6", buckets: 1, asks: 100, cost: 1, tier: perFree, plan: perFree,
			request: func(r *http.Request, _, i int) { behindProxy(r, fmt.Sprintf("2001:db8:0:7:%x::%x", i, i*i)) },
		}, {
			who: "somebody who guesses keys and forges addresses", buckets: 1, asks: 200, cost: 1, tier: perAddress,
			request: func(r *http.Request, _, i int) {
				behindProxy(r, "203.0.113.3", fmt.Sprintf("192.0.2.%d", i))
				withKey(r, rand.Text())
			},
		}, {
			who: "a pro key that states a cost of 1000000", buckets: 1, asks: 20, cost: maxCost, tier: perPro, plan: perPro,
			request: func(r *http.Request, _, _ int) {
				behindProxy(r, "203.0.113.4")
				withKey(r, "pro5-key")
				r.Header.Set(costHeader, "1000000")
			},
		},
	}
}

// stampede returns clients who each stay within their plan, and together are too many.
func stampede() []*party {
	return []*party{{
		who: "12 pro keys that spend all they have at once", buckets: 1, asks: 72, cost: maxCost, tier: overall, plan: perPro,
		request: func(r *http.Request, _, i int) {
			behindProxy(r, fmt.Sprintf("192.0.2.%d", 100+i%12))
			withKey(r, fmt.Sprintf("pro%d-key", 6+i%12))
			r.Header.Set(costHeader, strconv.Itoa(maxCost))
		},
	}}
}

// expected is what the limits allow a party, and of that what the limit on trial would have refused.
type expected struct{ admitted, trialed int }

// fill fills the party's buckets, as before its first request.
func (p *party) fill() { p.left, p.leftToday = int(p.tier.Capacity()), int(daily.Capacity()) }

// allows returns what the limits allow the party when it asks after the span. It is arithmetic on whole
// numbers, apart from that of the limiter.
func (p *party) allows(span time.Duration) expected {
	p.left = min(int(p.tier.Capacity()), p.left+arriving(p.tier, span))
	admitted := min(p.asks, p.left/p.cost)
	p.left -= admitted * p.cost
	trialed := 0
	if p.plan.Name() == perFree.Name() {
		trialed = max(0, admitted-p.leftToday/p.cost)
		p.leftToday -= (admitted - trialed) * p.cost
	}
	return expected{p.buckets * admitted, p.buckets * trialed}
}

// arriving returns how many tokens arrive in the span.
func arriving(limit ratelimit.Limit, span time.Duration) int {
	bucket, _ := limit.Policy().(ratelimit.TokenBucket) // as all tiers are
	return int(bucket.Rate) * int(span/time.Second) / int(bucket.Period/time.Second)
}
