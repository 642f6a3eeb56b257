package rules

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// maxCompiled is how many definitions in the code of one limit are remembered with each plan: usually there is one.
const maxCompiled = 16

// base is what holds for a plan where a key has no override.
type base struct {
	of    *limitRules
	name  string // of the rule, for reports
	chain chain
	empty bool // whether it leaves all to the definition in the code

	compiled atomic.Pointer[[]compiledRule]
}

// compiledRule is a rule for a definition of the limit in the code.
type compiledRule struct {
	limit ratelimit.Limit
	rule  *ratelimit.Ruling
}

func (of *limitRules) baseOf(plan string, so chain) *base {
	b := &base{of: of, name: nameOf(of.name, plan), chain: so, empty: len(so) == 1 && so[0].says == nil &&
		of.pause.until == 0}
	b.compiled.Store(&[]compiledRule{})
	return b
}

// base returns what holds for a plan.
func (of *limitRules) base(plan string) *base {
	if plan != "" {
		if b := of.bases[plan]; b != nil {
			return b
		}
	}
	return of.other
}

// rule returns the rule for a definition in the code, and nil if the definition decides.
func (b *base) rule(limit *ratelimit.Limit) *ratelimit.Ruling {
	if b.empty && !b.of.noted.isStandIn(limit) {
		return nil
	}
	for i, known := 0, *b.compiled.Load(); i < len(known); i++ {
		if known[i].limit == *limit {
			return known[i].rule
		}
	}
	return b.compile(*limit)
}

// compile makes the rule, and remembers it.
func (b *base) compile(limit ratelimit.Limit) *ratelimit.Ruling {
	rule := ruleOf(limit, b.name, b.of.complete(b.chain, &limit), b.of.pause, b.of.now)
	if !b.of.noted.note(limit) {
		return rule
	}
	for known := b.compiled.Load(); len(*known) < maxCompiled; known = b.compiled.Load() {
		more := append(slices.Clone(*known), compiledRule{limit, rule})
		if b.compiled.CompareAndSwap(known, &more) {
			break
		}
	}
	return rule
}

// ruleOf makes a rule of a chain. It returns nil where there is no such rule, which the checks before do not let
// happen.
func ruleOf(limit ratelimit.Limit, name string, so chain, p pause, now int64) *ratelimit.Ruling {
	config := ratelimit.RulingConfig{Name: name, Revisions: so.revisions(limit.Policy(), now)}
	if p.until != 0 {
		config.PausedUntil, config.PauseReason = time.UnixMicro(p.until), p.reason
	}
	rule, err := ratelimit.NewRuling(limit, config)
	if err != nil {
		return nil
	}
	return rule
}

// keyRule is the last rule made for a key: for a plan and a definition in the code.
type keyRule struct {
	base  *base
	limit ratelimit.Limit
	rule  *ratelimit.Ruling
}

// keyRule returns the rule of a key that has an override or a pause.
func (of *limitRules) keyRule(k *keyRules, limit *ratelimit.Limit, plan string) *ratelimit.Ruling {
	b := of.base(plan)
	if known := k.compiled.Load(); known != nil && known.base == b && known.limit == *limit {
		return known.rule
	}
	rule := of.compileKey(k, *limit, b, plan)
	k.compiled.Store(&keyRule{b, *limit, rule})
	return rule
}

func (of *limitRules) compileKey(k *keyRules, limit ratelimit.Limit, b *base, plan string) *ratelimit.Ruling {
	of.noted.note(limit)
	so, name := b.chain, b.name
	if len(k.overrides) > 0 {
		so, name = overridden(k.overrides, plan, of.effective), of.name+", override"
	}
	return ruleOf(limit, name, of.complete(so, &limit), of.pause.later(k.pause), of.now)
}
