package cli

import (
	"cmp"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// look adds to each change of a quota what it leaves in buckets. It needs the policies before and after, and knows only
// those in the tables and in the file: not the definitions in the code. From the tables it takes the last rule of each
// limit and plan, as the difference does: what is in force for another second depends on when somebody asks.
func (d *difference) look(list *rules.Listing, file []rules.Rule, from time.Time) {
	before, after := make(policies), make(policies)
	for _, r := range documentOf(list).Rules {
		before.add(r)
		after.add(r)
	}
	for _, r := range file {
		after.add(r)
	}
	for i := range d.views {
		c := &d.views[i]
		if c.Of == rules.OfRule && c.Change == deleted {
			delete(after, rules.RuleID{Limit: c.Limit, Plan: c.Plan})
		}
	}
	for i := range d.views {
		c := &d.views[i]
		was, is := before.under(c, c.Old), after.under(c, c.New)
		switch {
		case was != nil && is != nil:
			c.Outlook = rules.Outlook(was, is, onChangeOf(c.New, c.Old), cmp.Or(from, list.Now))
		case c.Of == rules.OfOverride:
			d.unknown++
		}
	}
}

// onChangeOf returns the OnChange of a statement. An override that is removed has its own once more.
func onChangeOf(next, old fmt.Stringer) ratelimit.OnChange {
	switch says := next.(type) {
	case *rules.Rule:
		return says.OnChange
	case *rules.Override:
		return says.OnChange
	}
	if o, ends := old.(*rules.Override); ends {
		return o.OnChange
	}
	return ""
}

type policies map[rules.RuleID]ratelimit.Policy

func (p policies) add(r rules.Rule) { p[rules.RuleID{Limit: r.Limit, Plan: r.Plan}] = r.Policy }

// of returns the policy of a plan: of its rule, or of the rule without a plan. It is nil if the definition in the code
// decides.
func (p policies) of(limit, plan string) ratelimit.Policy {
	if policy := p[rules.RuleID{Limit: limit, Plan: plan}]; policy != nil {
		return policy
	}
	return p[rules.RuleID{Limit: limit}]
}

// under returns the policy that a rule or an override states, or what decides without it.
func (p policies) under(c *changeView, says fmt.Stringer) ratelimit.Policy {
	switch says := says.(type) {
	case *rules.Rule:
		return says.Policy
	case *rules.Override:
		return says.PolicyOn("", func(plan string) ratelimit.Policy { return p.of(c.Limit, plan) })
	}
	return p.of(c.Limit, c.Plan)
}
