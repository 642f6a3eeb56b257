package rules

import (
	"errors"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// maxReported bounds the rows that an error names.
const maxReported = 10

// snapshot is a set that was loaded. It does not change.
type snapshot struct {
	version   int64
	limits    map[string]*limitRules
	tiers     TierSet
	now       int64 // when it was loaded
	rules     int
	overrides int
	skipped   int   // rows that cannot be read: the rows before them stay in effect
	wake      int64 // when a pause begins next; maxInstant for never
	err       error // of the skipped rows

	ahead atomic.Int64 // how far the database's clock was ahead of this process's when the version was last asked for
	plans atomic.Pointer[plansHeld]
}

// clock returns an estimate of the database's clock.
func (s *snapshot) clock() int64 { return time.Now().Add(time.Duration(s.ahead.Load())).UnixMicro() }

// plansHeld are the plans that rules are for, in order, from an instant until the next.
type plansHeld struct {
	plans       []string
	from, until int64
}

// plansAt returns the plans of the rules in effect at an instant or later, in order.
func (s *snapshot) plansAt(at int64) []string {
	if held := s.plans.Load(); held != nil && held.from <= at && at < held.until {
		return held.plans
	}
	held := &plansHeld{from: at, until: maxInstant}
	for _, of := range s.limits {
		for plan, stated := range of.plans {
			if plan != "" && stated.holdsFrom(at) {
				held.plans = append(held.plans, plan)
				held.until = min(held.until, stated.between(at, maxInstant).until(0))
			}
		}
	}
	slices.Sort(held.plans)
	held.plans = slices.Compact(held.plans)
	s.plans.Store(held)
	return held.plans
}

// limit returns the stand-in of a limit at an instant, and false if there is none. s may be nil.
func (s *snapshot) limit(name string, at int64) (ratelimit.Limit, bool) {
	if s == nil || s.limits[name] == nil {
		return ratelimit.Limit{}, false
	}
	of := s.limits[name]
	found := of.standIn(at)
	if found.known {
		of.noted.standsIn(found.limit)
	}
	return found.limit, found.known
}

// limitRules has the loaded rules of one limit.
type limitRules struct {
	name  string
	now   int64            // when it was loaded
	plans map[string]chain // the statements about each plan
	bases map[string]*base // what holds for each of these plans
	other *base            // what holds for every other plan, and none
	keys  map[string]*keyRules
	pause pause
	noted *definition

	bounded      atomic.Pointer[bounded]
	standing     atomic.Pointer[standIn]
	standInsOnce sync.Once
	standInChain chain
}

// keyRules has the loaded overrides and the pause of one key.
type keyRules struct {
	overrides []held
	pause     pause
	compiled  atomic.Pointer[keyRule]
}

type pause struct {
	from, until int64 // until is 0 for none
	reason      string
}

func (p pause) later(q pause) pause {
	if q.until > p.until {
		return q
	}
	return p
}

// compiler makes a snapshot of the rows that were loaded.
type compiler struct {
	next   *snapshot
	rules  map[RuleID]*stated
	paused map[Bucket][]pause // in the order in which they were stated
	said   map[said]held      // parsed overrides, without their times
	bad    []error
}

// stated has the statements about a rule.
type stated struct {
	chain chain
	rows  int
}

// compile makes a snapshot of the loaded rows. It skips a row that cannot be read, so that the row before it stays in
// effect.
func compile(l *loaded, noted *definitions) *snapshot {
	c := compiler{
		next:  &snapshot{version: l.version, now: l.now, limits: make(map[string]*limitRules), wake: maxInstant},
		rules: make(map[RuleID]*stated), paused: make(map[Bucket][]pause), said: make(map[said]held),
	}
	for i := range l.rows {
		if err := c.add(&l.rows[i]); err != nil {
			c.bad = append(c.bad, err)
		}
	}
	c.finishRules()
	c.finishPauses()
	for name, of := range c.next.limits {
		maps.DeleteFunc(of.keys, func(_ string, k *keyRules) bool { return len(k.overrides) == 0 && k.pause.until == 0 })
		if len(of.plans) == 0 && len(of.keys) == 0 && of.pause.until == 0 {
			delete(c.next.limits, name)
			continue
		}
		of.finish(noted.of(name))
	}
	if c.next.skipped = len(c.bad); c.next.skipped > 0 {
		c.next.err = errors.Join(c.bad[:min(len(c.bad), maxReported)]...)
	}
	return c.next
}

// add adds a row to the rows that were made before it.
func (c *compiler) add(r *row) (err error) {
	switch r.of {
	case OfRule:
		return c.addRule(r)
	case OfOverride:
		return c.addOverride(r)
	case OfPause:
		c.addPause(r)
	case OfTiers:
		var tiers TierSet
		if tiers, err = r.tiers(); err == nil {
			c.next.tiers = tiers
		}
	}
	return err
}

func (s *snapshot) of(name string) *limitRules {
	of := s.limits[name]
	if of == nil {
		of = &limitRules{name: name, now: s.now, plans: make(map[string]chain)}
		s.limits[name] = of
	}
	return of
}

// nameOf returns the name of a rule in decisions and reports.
func nameOf(limit, plan string) string {
	if plan == "" {
		return limit
	}
	return limit + ", plan " + plan
}

func (c *compiler) addRule(r *row) error {
	id := RuleID{r.name, r.plan}
	of := c.rules[id]
	if of == nil {
		of = &stated{chain: unsaid()}
		c.rules[id] = of
	}
	of.rows++
	s := span{from: r.from}
	if r.says != nil {
		rule, err := r.rule()
		if err != nil {
			return err
		}
		s.says = &terms{policy: rule.Policy, mode: rule.Mode, name: nameOf(r.name, r.plan), unit: rule.Unit}
		s.change = rule.OnChange
	}
	of.chain = of.chain.state(s)
	return nil
}

// finishRules forgets the rules that have been deleted for long. If more was stated of a rule than is loaded, its first
// statement stands for that.
func (c *compiler) finishRules() {
	for id, of := range c.rules {
		last := of.chain[len(of.chain)-1]
		if last.says != nil {
			c.next.rules++
		} else if last.from < c.next.now-kept.Microseconds() {
			continue
		}
		if of.rows > maxChain && len(of.chain) > 1 {
			of.chain[0].says = of.chain[1].says
		}
		c.next.of(id.Limit).plans[id.Plan] = of.chain
	}
}

// finish makes what holds for each plan.
func (of *limitRules) finish(noted *definition) {
	of.noted = noted
	of.other = of.baseOf("", of.chainOf(""))
	of.bases = make(map[string]*base, len(of.plans))
	for plan, stated := range of.plans {
		if plan != "" {
			of.bases[plan] = of.baseOf(plan, stated.over(of.chainOf("")))
		}
	}
}

func (of *limitRules) chainOf(plan string) chain {
	if stated, ok := of.plans[plan]; ok {
		return stated
	}
	return unsaid()
}

// effective returns what holds for a plan.
func (of *limitRules) effective(plan string) chain {
	if b, ok := of.bases[plan]; ok {
		return b.chain
	}
	return of.other.chain
}
