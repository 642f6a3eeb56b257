package rules

import (
	"math"
	"slices"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// definitions remembers how limits are defined in the code, as far as a Set was asked for them.
type definitions struct{ names sync.Map } // of *definition by name

// definition is how the limits of one name are defined.
type definition struct {
	mu     sync.Mutex
	limits []ratelimit.Policy
	many   bool // there are more
}

func (d *definitions) of(name string) *definition {
	found, _ := d.names.LoadOrStore(name, &definition{})
	return found.(*definition)
}

// note notes a limit that the Set was asked for.
func (d *definition) note(limit ratelimit.Limit) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch policy := limit.Policy(); {
	case !isComparable(limit), len(d.limits) == maxCompiled && !slices.Contains(d.limits, policy):
		d.many = true
	case !slices.Contains(d.limits, policy):
		d.limits = append(d.limits, policy)
	}
}

// known returns the definitions; ok is false when there may be others.
func (d *definition) known() (policies []ratelimit.Policy, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.limits), len(d.limits) > 0 && !d.many
}

// RulesOf returns rules under which no bucket of a limit is full before it is so under each rule, plan and override that
// is loaded, now and in all eras; see [ratelimit.Policies]. They are few, however many overrides there are. While it does
// not know how the limit is defined in the code, and an override is a multiple of that, no bucket is full.
func (s *Set) RulesOf(name string) []*ratelimit.Rule {
	current := s.current.Load()
	if current == nil || current.limits[name] == nil {
		return nil
	}
	b := bounds{name: name}
	b.addAll(current.limits[name])
	return b.rules()
}

// bounds collects policies as what they are to one row: the tokens that it holds, and those that arrive in a nanosecond.
type bounds struct {
	name    string
	unknown bool // whether there are policies that it cannot judge
	groups  [64]bound
}

// bound is at least as large, and at most as fast, as each policy of its group: those with capacities of the same size.
type bound struct {
	capacity, speed float64
	used            bool
}

func (b *bounds) addAll(of *limitRules) {
	code, known := of.noted.known()
	for _, so := range of.plans {
		for _, s := range so {
			if s.says != nil {
				b.add(s.says.policy)
			}
		}
	}
	for _, k := range of.keys {
		for i := range k.overrides {
			switch o := &k.overrides[i]; {
			case o.says != nil:
				b.add(o.says.policy)
			case o.times != 0:
				b.unknown = b.unknown || !known
				b.addTimes(of, o.times, code)
			}
		}
	}
}

// addTimes adds what an override that multiplies may make of anything.
func (b *bounds) addTimes(of *limitRules, times float64, code []ratelimit.Policy) {
	for _, policy := range code {
		b.add(scale(policy, times))
	}
	for _, so := range of.plans {
		for _, s := range so {
			if s.says != nil {
				b.add(scale(s.says.policy, times))
			}
		}
	}
}

// add adds a policy. Windows may lag behind a steady stream by what comes with one of them, so they count as a bucket that
// holds as much more.
func (b *bounds) add(policy ratelimit.Policy) {
	n, ok := numbersOf(policy)
	if !ok {
		b.unknown = true
		return
	}
	capacity := n.capacity
	if n.window {
		capacity += n.rate
	}
	capacity, rate := capacity/float64(n.shards), n.rate/float64(n.period)/float64(n.shards)
	g := &b.groups[min(max(int(math.Log2(max(capacity, minTokens)*1e9)), 0)*len(b.groups)/72, len(b.groups)-1)]
	if !g.used {
		*g = bound{capacity: capacity, speed: rate, used: true}
	}
	g.capacity, g.speed = max(g.capacity, capacity), min(g.speed, rate)
}

// rules returns a rule for each policy that bounds.
func (b *bounds) rules() (rules []*ratelimit.Rule) {
	for _, policy := range b.policies() {
		if rule := b.rule(policy); rule != nil {
			rules = append(rules, rule)
		}
	}
	return rules
}

// policies returns one for each group, and one that is never full where a group cannot be bounded by a policy.
func (b *bounds) policies() (policies []ratelimit.Policy) {
	for i := range b.groups {
		g := &b.groups[i]
		if !g.used {
			continue
		}
		policy := g.policy()
		if b.rule(policy) == nil {
			b.unknown = true
			continue
		}
		policies = append(policies, policy)
	}
	if b.unknown {
		policies = append(policies, ratelimit.TokenBucket{Rate: maxTokens, Period: maxPeriod})
	}
	return policies
}

// rule returns nil when the policy cannot be.
func (b *bounds) rule(policy ratelimit.Policy) *ratelimit.Rule {
	limit, err := ratelimit.NewLimit(b.name, policy)
	if err != nil {
		return nil
	}
	return ruleOf(limit, b.name, unsaid(), pause{})
}

// policy returns the bound as a policy, rounded towards what is full later.
func (g *bound) policy() ratelimit.Policy {
	policy := ratelimit.TokenBucket{Capacity: max(math.Nextafter(g.capacity, math.Inf(1)), minTokens)}
	for _, period := range []time.Duration{time.Hour, time.Microsecond, maxPeriod} {
		rate := math.Nextafter(g.speed*float64(period), 0)
		if rate >= minTokens && rate <= maxTokens {
			policy.Rate, policy.Period = rate, period
			break
		}
	}
	return policy
}
