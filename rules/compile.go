package rules

import (
	"errors"
	"fmt"
	"math"
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
	kept      int   // rules and overrides that are those of the snapshot before, as they cannot be read
	wake      int64 // when the next pause begins; maxInstant for never
	ahead     time.Duration
	err       error // what is wrong with those that were kept
}

// limitRules is what is loaded of one limit.
type limitRules struct {
	name  string
	now   int64            // when it was loaded
	plans map[string]chain // what was stated of each plan
	bases map[string]*base // what holds for each of these plans
	other *base            // what holds for every other plan, and none
	keys  map[string]*keyRules
	pause pause
	noted *definition

	bounded atomic.Pointer[bounded]
}

// keyRules is what is loaded of one key.
type keyRules struct {
	overrides []held
	pause     pause
	compiled  atomic.Pointer[keyRule]
}

type pause struct {
	until  int64 // 0: none
	reason string
}

// later returns the pause that ends later.
func (p pause) later(q pause) pause {
	if q.until > p.until {
		return q
	}
	return p
}

// compiler makes a snapshot of what was loaded.
type compiler struct {
	next    *snapshot
	last    *snapshot // the one before; nil at first
	bad     []error
	badKeys map[Bucket]bool
}

// compile makes a snapshot of what was loaded. Of what cannot be read it keeps what the last snapshot has.
func compile(l *loaded, last *snapshot, noted *definitions) *snapshot {
	c := compiler{
		next: &snapshot{version: l.version, now: l.now, limits: make(map[string]*limitRules), wake: maxInstant, rules: len(l.rules)},
		last: last, badKeys: make(map[Bucket]bool),
	}
	c.rules(l)
	c.overrides(l.overrides)
	c.pauses(l)
	for _, of := range c.next.limits {
		of.finish(noted.of(of.name))
	}
	c.tiers(l)
	c.next.overrides = len(l.overrides)
	if c.next.kept = len(c.bad); c.next.kept > 0 {
		c.next.err = errors.Join(c.bad[:min(len(c.bad), maxReported)]...)
	}
	return c.next
}

func (s *snapshot) of(name string) *limitRules {
	of := s.limits[name]
	if of == nil {
		of = &limitRules{name: name, now: s.now, plans: make(map[string]chain)}
		s.limits[name] = of
	}
	return of
}

// termsOf returns the policy of a rule, ready for an era.
func termsOf(r *Rule) (*terms, error) {
	return &terms{policy: r.Policy, mode: r.Mode, name: nameOf(r.Limit, r.Plan), unit: r.Unit}, checkPolicy(r.Limit, r.Policy, r.Mode, r.OnChange)
}

// nameOf returns how a rule is called in what is told of decisions.
func nameOf(limit, plan string) string {
	if plan == "" {
		return limit
	}
	return limit + ", plan " + plan
}

// rules makes the chains of the rules. What a row says of its rule is what holds last, and the history says what held
// before. A rule without a row is not there any more: if the history does not say since when, it never was.
func (c *compiler) rules(l *loaded) {
	told := c.history(l.history)
	for i := range l.rules {
		r := &l.rules[i]
		id := RuleID{r.name, r.plan}
		h := told[id]
		if h == nil {
			h = &toldRule{chain: unsaid()}
		}
		delete(told, id)
		says, err := termsOf(new(r.row.rule(r.name, r.plan)))
		if err = errors.Join(h.err, err); err != nil {
			c.keepRule(id, h.chain, err)
			continue
		}
		c.next.of(r.name).plans[r.plan] = h.chain.state(span{from: r.from, says: says, change: ratelimit.OnChange(r.row.OnChange)})
	}
	for id, h := range told {
		switch {
		case !h.deleted, h.chain[len(h.chain)-1].from < l.now-kept.Microseconds():
		case h.err != nil:
			c.keepRule(id, h.chain, h.err)
		default:
			c.next.of(id.Limit).plans[id.Plan] = h.chain
		}
	}
}

// toldRule is what the history tells of a rule.
type toldRule struct {
	chain   chain
	deleted bool  // whether this is the last change
	err     error // of entries that cannot be read, and are left out
}

func (c *compiler) history(changes []loadedChange) map[RuleID]*toldRule {
	told := make(map[RuleID]*toldRule)
	for i := range changes {
		change := &changes[i]
		id := RuleID{change.name, change.plan}
		h := told[id]
		if h == nil {
			h = &toldRule{chain: unsaid()}
			told[id] = h
		}
		h.deleted = change.row == nil && change.err == nil
		said, err := change.span()
		switch {
		case err != nil:
			h.err = errors.Join(h.err, err)
		case change.dropped:
			h.chain = chain{{from: minInstant, says: said.says, slowest: true}}
		default:
			h.chain = h.chain.state(said)
		}
	}
	return told
}

// span returns what holds from the change on.
func (c *loadedChange) span() (span, error) {
	s := span{from: c.from}
	if c.err != nil {
		return s, fmt.Errorf("its history: %w", c.err)
	}
	if c.row == nil {
		return s, nil
	}
	says, err := termsOf(new(c.row.rule(c.name, c.plan)))
	if err != nil {
		return s, fmt.Errorf("its history: %w", err)
	}
	s.says, s.change = says, ratelimit.OnChange(c.row.OnChange)
	return s, nil
}

// keepRule keeps the rule as it was loaded before, or else as the history tells it.
func (c *compiler) keepRule(id RuleID, told chain, err error) {
	c.bad = append(c.bad, fmt.Errorf("rule %q, plan %q: %w", id.Limit, id.Plan, err))
	if c.last != nil && c.last.limits[id.Limit] != nil {
		if so, ok := c.last.limits[id.Limit].plans[id.Plan]; ok {
			told = so
		}
	}
	c.next.of(id.Limit).plans[id.Plan] = told
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

// chainOf returns what was stated of a plan.
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

// neverLate is what loaded.late is when nothing is new.
const neverLate = int64(math.MinInt64 / 2)

// lateness returns how long after its beginning the latest change is in use, when it is from now on.
func (l *loaded) lateness() time.Duration {
	late := l.late + time.Since(l.asked).Microseconds()
	return time.Duration(min(max(late, 0), math.MaxInt64/1000)) * time.Microsecond
}
