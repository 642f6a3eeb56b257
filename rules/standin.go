package rules

import (
	"maps"
	"slices"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// standIn is the limit in place of a missing definition in the code, from an instant until the next.
type standIn struct {
	limit       ratelimit.Limit
	known       bool // whether a rule is in effect or scheduled
	from, until int64
}

// standIn returns the stand-in at an instant: the policy of the rule without a plan, or else the smallest among those
// of plans. If no rule is in effect, it is that of the next one, in its mode. known is false if there is none.
func (of *limitRules) standIn(at int64) standIn {
	if s := of.standing.Load(); s != nil && s.from <= at && at < s.until {
		return *s
	}
	s := standIn{from: minInstant, until: maxInstant}
	for _, stated := range of.plans {
		part := stated.between(at, maxInstant)
		s.known = s.known || slices.ContainsFunc(part, span.hasTerms)
		s.until = min(s.until, part.until(0))
		s.from = max(s.from, stated.holding(at).from)
	}
	if s.known {
		limit, err := ratelimit.NewLimit(of.name, of.standIns().holding(at).says.policy)
		s.limit, s.known = limit, err == nil
	}
	of.standing.Store(&s)
	return s
}

// standIns returns the stand-ins of all instants. It depends on the rules alone, so every process finds the same. After
// the last rule it has the policy of the last one.
func (of *limitRules) standIns() chain {
	of.standInsOnce.Do(func() { of.standInChain = of.makeStandIns() })
	return of.standInChain
}

func (of *limitRules) makeStandIns() chain {
	starts := []int64{minInstant}
	for _, stated := range of.plans {
		for _, s := range stated {
			starts = append(starts, s.from)
		}
	}
	slices.Sort(starts)
	starts = slices.Compact(starts)
	plans := slices.Sorted(maps.Keys(of.plans)) // the empty one first
	stood := make(chain, len(starts))
	for i, at := range starts {
		stood[i] = span{from: at, says: of.smallest(plans, at)}
	}
	same := func(a, b span) bool { return a.says == b.says }
	stood = slices.CompactFunc(stood, same)
	var next *terms
	for i := len(stood) - 1; i >= 0; i-- {
		says := stood[i].says
		if says == nil {
			stood[i].says = next // in its own mode, so that a new rule in shadow refuses nothing before it takes effect
			continue
		}
		next = says
		if says.mode != "" && says.mode != ratelimit.On { // on, as a definition in the code
			says = &terms{policy: says.policy, mode: ratelimit.On, name: says.name, unit: says.unit}
		}
		stood[i].says = says
	}
	if last := len(stood) - 1; last > 0 && stood[last].says == nil {
		stood[last].says = stood[last-1].says
	}
	return slices.CompactFunc(stood, same)
}

// smallest returns the terms of the rule without a plan, or else those with the smallest capacity among the plans, in
// effect at an instant. It returns nil if there are none.
func (of *limitRules) smallest(plans []string, at int64) *terms {
	var found *terms
	least := 0.0
	for _, plan := range plans {
		says := of.plans[plan].holding(at).says
		if says == nil {
			continue
		}
		if n, _ := numbersOf(says.policy); found == nil || n.Capacity < least {
			found, least = says, n.Capacity
		}
		if plan == "" {
			break
		}
	}
	return found
}

// holding returns the span in effect at an instant.
func (c chain) holding(at int64) span {
	i := len(c) - 1
	for i > 0 && c[i].from > at {
		i--
	}
	return c[i]
}

// complete returns the chain for a definition in the code, or for a stand-in: then it has stand-ins where it would
// leave the decision to the code. So also a request that was made before a change is decided as one made after it.
func (of *limitRules) complete(so chain, limit *ratelimit.Limit) chain {
	if !of.noted.isStandIn(limit) {
		return so
	}
	return so.over(of.standIns())
}

// maxStandIns bounds the stand-ins of one limit that are remembered: a limit has a few in its life.
const maxStandIns = 1000

// standsIn notes a limit that the Set returned for a program that defines none.
func (d *definition) standsIn(limit ratelimit.Limit) {
	for {
		known := d.standIns.Load()
		more := make(map[ratelimit.Limit]bool)
		if known != nil {
			if (*known)[limit] || len(*known) == maxStandIns {
				return
			}
			maps.Copy(more, *known)
		}
		more[limit] = true
		if d.standIns.CompareAndSwap(known, &more) {
			return
		}
	}
}

func (d *definition) isStandIn(limit *ratelimit.Limit) bool {
	known := d.standIns.Load()
	return known != nil && (*known)[*limit]
}
