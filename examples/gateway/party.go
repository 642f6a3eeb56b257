package main

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/pgratelimit/pgratelimit/rules"
)

// party is some clients who ask alike, all at once. Each has a bucket of the limit that stops them to
// himself, or they share one.
type party struct {
	who     string
	buckets int
	asks    int    // of each bucket
	cost    int    // of each ask, to the limit that stops them
	tier    string // the rule that stops them
	plan    string // empty when they have none
	request func(r *http.Request, bucket, i int)

	stops, daily    rules.Rule // what rules.yaml says of tier, and of the limit on trial
	left, leftToday int        // in each bucket
}

// The rules by the names under which decisions tell of them.
const (
	ofAddress = "gateway.address"
	ofFree    = "gateway.key, plan free"
	ofPro     = "gateway.key, plan pro"
	ofAll     = "gateway.all"
	ofDaily   = "gateway.daily"
)

// rulesByName returns the rules of rules.yaml.
func rulesByName() (map[string]rules.Rule, error) {
	file, err := rules.Read(bytes.NewReader(rulesFile))
	if err != nil {
		return nil, err
	}
	byName := map[string]rules.Rule{}
	for _, rule := range file.Rules {
		name := rule.Limit
		if rule.Plan != "" {
			name += ", plan " + rule.Plan
		}
		byName[name] = rule
	}
	return byName, nil
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
	for plan, names := range map[string]int{planFree: 4, planPro: 20} {
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
			who: "4 keys on the free plan", buckets: 4, asks: 100, cost: 1, tier: ofFree, plan: planFree,
			request: func(r *http.Request, bucket, _ int) {
				behindProxy(r, fmt.Sprintf("192.0.2.%d", bucket))
				withKey(r, fmt.Sprintf("free%d-key", bucket))
			},
		}, {
			who: "2 keys on the pro plan, 10 tokens a request", buckets: 2, asks: 100, cost: 10, tier: ofPro, plan: planPro,
			request: func(r *http.Request, bucket, _ int) {
				behindProxy(r, fmt.Sprintf("192.0.2.%d", 10+bucket))
				withKey(r, fmt.Sprintf("pro%d-key", bucket))
				r.Header.Set(costHeader, "10")
			},
		}, {
			who: "4 visitors without a key", buckets: 4, asks: 80, cost: 1, tier: ofFree, plan: planFree,
			request: func(r *http.Request, bucket, _ int) { behindProxy(r, fmt.Sprintf("192.0.2.%d", 20+bucket)) },
		}, {
			who: "3 pro keys in an office with one address", buckets: 1, asks: 180, cost: 1, tier: ofAddress, plan: planPro,
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
			who: "a visitor who forges addresses and cookies", buckets: 1, asks: 150, cost: 1, tier: ofFree, plan: planFree,
			request: func(r *http.Request, _, i int) {
				forged := fmt.Sprintf("10.%d.%d.%d", i%3, i%5, i)
				behindProxy(r, "203.0.113.1", [][]string{{forged}, {forged + ", garbage", "::1"}, {"127.0.0.1, 192.0.2.1"}}[i%3]...)
				r.Header.Set("Cookie", "__Host-visitor="+rand.Text())
			},
		}, {
			who: "a visitor who has 2^64 addresses of IPv6", buckets: 1, asks: 100, cost: 1, tier: ofFree, plan: planFree,
			request: func(r *http.Request, _, i int) { behindProxy(r, fmt.Sprintf("2001:db8:0:7:%x::%x", i, i*i)) },
		}, {
			who: "somebody who guesses keys and forges addresses", buckets: 1, asks: 200, cost: 1, tier: ofAddress,
			request: func(r *http.Request, _, i int) {
				behindProxy(r, "203.0.113.3", fmt.Sprintf("192.0.2.%d", i))
				withKey(r, rand.Text())
			},
		}, {
			who: "a pro key that states a cost of 1000000", buckets: 1, asks: 20, cost: maxCost, tier: ofPro, plan: planPro,
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
		who: "12 pro keys that spend all they have at once", buckets: 1, asks: 72, cost: maxCost, tier: ofAll, plan: planPro,
		request: func(r *http.Request, _, i int) {
			behindProxy(r, fmt.Sprintf("192.0.2.%d", 100+i%12))
			withKey(r, fmt.Sprintf("pro%d-key", 6+i%12))
			r.Header.Set(costHeader, strconv.Itoa(maxCost))
		},
	}}
}

// expected is what the limits allow a party, and how many of those who ask the limit on trial would refuse, whoever else
// does.
type expected struct{ admitted, tried, trialed int }

// fill fills the party's buckets, as before its first request.
func (p *party) fill(byName map[string]rules.Rule) {
	p.stops, p.daily = byName[p.tier], byName[ofDaily]
	p.left, p.leftToday = capacity(p.stops), capacity(p.daily)
}

// capacity returns how much a bucket holds, as all rules here say nothing of it.
func capacity(rule rules.Rule) int { return int(rule.Rate) }

// allows returns what the limits allow the party when it asks after the span. It is arithmetic on whole
// numbers, apart from that of the limiter.
func (p *party) allows(span time.Duration) expected {
	p.left = min(capacity(p.stops), p.left+arriving(p.stops, span))
	admitted := min(p.asks, p.left/p.cost)
	p.left -= admitted * p.cost
	if p.plan != planFree {
		return expected{admitted: p.buckets * admitted}
	}
	tried, trialed := min(admitted, p.leftToday/p.cost), 0
	p.leftToday -= tried * p.cost
	if p.leftToday < p.cost {
		trialed = p.asks - tried
	}
	return expected{p.buckets * admitted, p.buckets * tried, p.buckets * trialed}
}

// arriving returns how many tokens arrive in the span, by a rule that is a token bucket.
func arriving(rule rules.Rule, span time.Duration) int {
	return int(rule.Rate) * int(span/time.Second) / int(rule.Period/time.Second)
}
