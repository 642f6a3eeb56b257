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
	var after []rules.Statement // those of the file come first, so that they decide
	for i := range file {
		after = append(after, rules.Statement{Limit: file[i].Limit, Plan: file[i].Plan, Rule: &file[i]})
	}
	isDeleted := make(map[thing]bool)
	for _, c := range d.views {
		isDeleted[thing{c.Of, c.Limit, c.Plan, c.Key}] = c.Change == deleted
	}
	for _, s := range list.Rules {
		if !isDeleted[thingOf(&s)] {
			after = append(after, s)
		}
	}
	for i := range d.views {
		c := &d.views[i]
		was, is := c.policyUnder(list.Rules, c.Old), c.policyUnder(after, c.New)
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

// policyUnder returns the policy that a rule or an override states, or what the stored rules decide without it: those
// that no later ones replace. It is nil if the definition in the code decides.
func (c *changeView) policyUnder(stored []rules.Statement, says fmt.Stringer) ratelimit.Policy {
	ofPlan := func(plan string) ratelimit.Policy {
		return rules.PolicyIn(stored, c.Limit, plan, time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC))
	}
	switch says := says.(type) {
	case *rules.Rule:
		return says.Policy
	case *rules.Override:
		return says.PolicyOn("", ofPlan)
	}
	return ofPlan(c.Plan)
}
