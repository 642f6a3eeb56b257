package rules

import (
	"cmp"
	"slices"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const (
	// maxChain is how many changes of a rule, and overrides of a key, are kept apart. What is older of a rule is one era,
	// the slowest of them.
	maxChain = 8
	// maxEras is how many eras a rule has where several chains come together.
	maxEras = 16
)

// terms are what a rule or an override says, ready for a ratelimit.Era.
type terms struct {
	policy ratelimit.Policy
	mode   ratelimit.Mode
	name   string // as it is told
	unit   string
}

// span is what holds from an instant until the next span of its chain begins. The first span of a chain holds from the
// beginning of time.
type span struct {
	from   int64
	says   *terms  // nil: whatever is less specific decides
	times  float64 // of what it says; 0: as it is
	change ratelimit.OnChange
	// slowest is set of a first span that stands for several: the definition in the code is one of them.
	slowest bool
}

// chain are spans in the order of their beginnings.
type chain []span

// unsaid returns the chain that leaves everything to the less specific.
func unsaid() chain { return chain{{from: minInstant}} }

// state says what holds from an instant on, in place of what was to begin then or later.
func (c chain) state(s span) chain {
	s.from = max(s.from, minInstant+1)
	for len(c) > 1 && c[len(c)-1].from >= s.from {
		c = c[:len(c)-1]
	}
	return append(c, s)
}

// until returns when the i-th span ends.
func (c chain) until(i int) int64 {
	if i+1 < len(c) {
		return c[i+1].from
	}
	return maxInstant
}

// between returns the part of the chain from an instant until another, beginning with what holds at the first.
func (c chain) between(from, until int64) chain {
	i := 0
	for i+1 < len(c) && c[i+1].from <= from {
		i++
	}
	part := chain{c[i]}
	part[0].from = from
	for i++; i < len(c) && c[i].from < until; i++ {
		part = append(part, c[i])
	}
	return part
}

// over returns the chain of c where it says something, and of base elsewhere.
func (c chain) over(base chain) chain {
	var merged chain
	for i, s := range c {
		part := chain{s}
		if s.says == nil {
			part = base.between(s.from, c.until(i)).scaled(s.times)
		}
		part[0].change = s.change
		merged = append(merged, part...)
	}
	return merged
}

// scaled returns a copy of the chain with so many times what it says; 0 is once.
func (c chain) scaled(times float64) chain {
	if times == 0 {
		return c
	}
	c = slices.Clone(c)
	for i := range c {
		c[i].times = times
	}
	return c
}

// eras returns the chain for a limit as it is defined in the code.
func (c chain) eras(code ratelimit.Policy) []ratelimit.Era {
	eras := make([]ratelimit.Era, len(c))
	for i, s := range c {
		e := ratelimit.Era{From: timeOf(&s.from), OnChange: s.change}
		if s.says != nil {
			e.Policy, e.Mode, e.Name, e.Unit = s.says.policy, s.says.mode, s.says.name, s.says.unit
		}
		if s.slowest && (e.Policy == nil || speed(code) < speed(e.Policy)) {
			e.Policy, e.Mode, e.Name, e.Unit = nil, ratelimit.On, "", ""
		}
		if s.times != 0 {
			if e.Policy == nil {
				e.Policy = code
			}
			e.Policy, e.Name = scale(e.Policy, s.times), "" // which is that of the override
		}
		eras[i] = e
	}
	return latest(eras, code)
}

// latest returns the last maxEras of eras. What is older is the first of them: the slowest.
func latest(eras []ratelimit.Era, code ratelimit.Policy) []ratelimit.Era {
	older := len(eras) - maxEras
	if older <= 0 {
		return eras
	}
	pace := func(e ratelimit.Era) float64 {
		if e.Policy == nil {
			return speed(code)
		}
		return speed(e.Policy)
	}
	slowest := slices.MinFunc(eras[:older+1], func(a, b ratelimit.Era) int { return cmp.Compare(pace(a), pace(b)) })
	eras = eras[older:]
	eras[0].Policy, eras[0].Mode, eras[0].Name, eras[0].Unit = slowest.Policy, slowest.Mode, slowest.Name, slowest.Unit
	return eras
}

// held is a span in which an override of a key holds.
type held struct {
	from, until int64
	times       float64
	plan        string
	says        *terms
	change      ratelimit.OnChange
}

// overridden returns what holds for a key on a plan of which chainOf knows the chain, under the overrides of the key in
// the order of their beginnings.
func overridden(overrides []held, plan string, chainOf func(plan string) chain) chain {
	base := chainOf(plan)
	merged := base.between(minInstant, overrides[0].from)
	for i := range overrides {
		o := &overrides[i]
		next := maxInstant
		if i+1 < len(overrides) {
			next = overrides[i+1].from
		}
		until := min(o.until, next)
		var part chain
		switch {
		case o.says != nil:
			part = chain{{from: o.from, says: o.says}}
		case o.plan != "":
			part = chainOf(o.plan).between(o.from, until)
		default:
			part = base.between(o.from, until).scaled(o.times)
		}
		part[0].change = o.change
		merged = append(merged, part...)
		if until < next {
			part = base.between(until, next)
			part[0].change = o.change
			merged = append(merged, part...)
		}
	}
	return merged
}
