package rules

import (
	"slices"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const (
	// maxChain is how many statements about a rule are loaded, and maxAhead of them at most lie ahead.
	maxChain = 100
	// maxRevisions is how many revisions that have ended a ruling knows.
	maxRevisions = 16
)

// terms are what a rule or an override says, ready for a ratelimit.Revision.
type terms struct {
	policy ratelimit.Policy
	mode   ratelimit.Mode
	name   string // for reports
	unit   string
}

// span is what holds from an instant until the next span of its chain begins. The first span of a chain holds from the
// beginning of time.
type span struct {
	from   int64
	says   *terms  // nil: the less specific rule decides
	times  float64 // a multiple of the terms; 0: 1
	change ratelimit.OnChange
}

// chain are spans in the order of their beginnings.
type chain []span

// unsaid returns the chain that leaves everything to the less specific.
func unsaid() chain { return chain{{from: minInstant}} }

// state adds a span. It replaces the spans that begin at the same instant or later.
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

// hasTerms reports whether the span leaves nothing to the less specific.
func (s span) hasTerms() bool { return s.says != nil }

// holdsFrom reports whether a span with terms holds at now or later.
func (c chain) holdsFrom(now int64) bool {
	return slices.ContainsFunc(c.between(now, maxInstant), span.hasTerms)
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

// scaled returns a copy of the chain with multiples of its terms; 0 is 1.
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

// revisions returns the chain as revisions, for a definition in the code. Of the revisions that have ended it has the
// last maxRevisions, the first of which stands for all earlier ones.
func (c chain) revisions(code ratelimit.Policy, now int64) []ratelimit.Revision {
	for len(c) > maxRevisions+1 && c[maxRevisions+1].from <= now {
		c = c[1:]
	}
	revisions := make([]ratelimit.Revision, len(c))
	for i, s := range c {
		e := ratelimit.Revision{EffectiveAt: timeOf(&s.from), OnChange: s.change}
		if s.says != nil {
			e.Policy, e.Mode, e.Name, e.Unit = s.says.policy, s.says.mode, s.says.name, s.says.unit
		}
		if s.times != 0 {
			e.Policy, e.Name = ratelimit.Scale(policyOr(e.Policy, code), s.times), "" // the override names it
		}
		revisions[i] = e
	}
	changeByRow(revisions, code)
	return revisions
}

// changeByRow replaces each OnChange that ratelimit.NewRuling refuses. A change of the kind, or of the number of
// rows, resets the bucket.
func changeByRow(revisions []ratelimit.Revision, code ratelimit.Policy) {
	for i := 1; i < len(revisions); i++ {
		before, _ := numbersOf(policyOr(revisions[i-1].Policy, code))
		now, _ := numbersOf(policyOr(revisions[i].Policy, code))
		if now.Kind != before.Kind || now.Shards != before.Shards {
			revisions[i].OnChange = ratelimit.ResetTokens
		}
	}
}

func policyOr(policy, code ratelimit.Policy) ratelimit.Policy {
	if policy == nil {
		return code
	}
	return policy
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
