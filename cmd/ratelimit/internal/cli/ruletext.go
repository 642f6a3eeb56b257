package cli

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// ruleView is a rule for programs: as a rules file has it, and what is known of it besides.
type ruleView struct {
	rules.Rule
	statedView
}

// statedView is what is known of a rule or an override that is stored.
type statedView struct {
	Version int64     `json:"version,omitzero"` // 0: not stored yet, or an override
	From    time.Time `json:"from,omitzero"`
	Until   time.Time `json:"until,omitzero"`  // when a change of a rule holds that lies ahead
	Author  string    `json:"author,omitzero"` // of an override
	Reason  string    `json:"reason,omitzero"`
}

// withFields returns a JSON object with the fields of another behind its own.
func withFields(object, more any) ([]byte, error) {
	data, err := json.Marshal(object)
	if err != nil {
		return nil, err
	}
	fields, err := json.Marshal(more)
	if err != nil || len(fields) == len("{}") {
		return data, err
	}
	return slices.Concat(data[:len(data)-1], []byte(","), fields[1:]), nil
}

// MarshalJSON returns the rule as a rules file has it, with what is known besides.
func (v *ruleView) MarshalJSON() ([]byte, error) { return withFields(v.Rule, v.statedView) }

func ruleViewOf(r *rules.Rule) *ruleView {
	v := &ruleView{Rule: *r}
	v.Mode, v.OnChange = cmp.Or(r.Mode, ratelimit.On), cmp.Or(r.OnChange, ratelimit.KeepTokens)
	return v
}

// words returns the rule for people, without its limit and plan.
func (v *ruleView) words() string {
	text := v.Policy.String()
	if v.Mode != ratelimit.On {
		text += ", mode " + string(v.Mode)
	}
	if v.OnChange != ratelimit.KeepTokens {
		text += ", on change " + string(v.OnChange)
	}
	if v.Unit != "" {
		text += ", unit " + v.Unit
	}
	if v.Description != "" {
		text += ", description " + fmt.Sprintf("%q", v.Description)
	}
	if !v.Until.IsZero() {
		text += ", until " + instant(v.Until)
	}
	return text
}

// overrideView is the override of a key for programs: as a rules file has it, and what is known of it besides.
type overrideView struct {
	rules.Override
	statedView
}

// MarshalJSON returns the override as a rules file has it, with what is known besides.
func (v *overrideView) MarshalJSON() ([]byte, error) { return withFields(v.Override, v.statedView) }

func overrideViewOf(o *rules.Override, edit rules.Edit) *overrideView {
	v := &overrideView{*o, statedView{From: edit.From, Author: edit.Author, Reason: edit.Reason}}
	v.OnChange, v.Override.Until = cmp.Or(o.OnChange, ratelimit.KeepTokens), stored(o.Until)
	if o.Policy != nil {
		v.Mode = cmp.Or(o.Mode, ratelimit.On)
	}
	return v
}

// stored returns an instant as the tables keep it.
func stored(at time.Time) time.Time { return at.UTC().Truncate(time.Microsecond) }

// words returns the override for people, without its limit and key.
func (v *overrideView) words() string {
	var parts []string
	switch {
	case v.Policy != nil:
		parts = append(parts, v.Policy.String())
		if v.Mode != ratelimit.On {
			parts = append(parts, "mode "+string(v.Mode))
		}
	case v.OnPlan != "":
		parts = append(parts, "as on plan "+v.OnPlan)
	default:
		parts = append(parts, number(v.Multiplier)+" times")
	}
	if v.OnChange != ratelimit.KeepTokens {
		parts = append(parts, "on change "+string(v.OnChange))
	}
	if !v.Override.Until.IsZero() {
		parts = append(parts, "until "+instant(v.Override.Until))
	}
	return strings.Join(parts, ", ")
}

// pauseView is a pause for programs.
type pauseView struct {
	Limit  string    `json:"limit"`
	Key    string    `json:"key"` // empty: every bucket of the limit
	Until  time.Time `json:"until"`
	From   time.Time `json:"from,omitzero"`
	Author string    `json:"author,omitzero"`
	Reason string    `json:"reason,omitzero"`
}

// tiersView is the list of tiers for programs.
type tiersView struct {
	Match rules.Match  `json:"match"`
	Tiers []rules.Tier `json:"tiers"`
}

func tiersViewOf(set *rules.TierSet) *tiersView {
	v := &tiersView{Match: cmp.Or(set.Match, rules.MatchAll), Tiers: []rules.Tier{}}
	for _, t := range set.Tiers {
		t.CostSource, t.FixedCost, t.DefaultCost = cmp.Or(t.CostSource, "fixed"), cmp.Or(t.FixedCost, 1), cmp.Or(t.DefaultCost, 1)
		v.Tiers = append(v.Tiers, t)
	}
	return v
}

// tierWords returns a tier for people.
func tierWords(t *rules.Tier) string {
	parts := []string{t.Limit + " by " + cmp.Or(t.Key, "nothing (shared)")}
	if t.Route != "" {
		parts = append(parts, "at "+t.Route)
	}
	names := make([]string, 0, len(t.When))
	for name := range t.When {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		parts = append(parts, fmt.Sprintf("when %s is %q", name, t.When[name]))
	}
	switch {
	case t.CostSource != "fixed":
		parts = append(parts, fmt.Sprintf("cost from %s, else %s", t.CostSource, number(t.DefaultCost)))
	case t.FixedCost != 1:
		parts = append(parts, "cost "+number(t.FixedCost))
	}
	return strings.Join(parts, ", ")
}

func (v *tiersView) words() string {
	if len(v.Tiers) == 0 {
		return "none"
	}
	parts := make([]string, len(v.Tiers))
	for i := range v.Tiers {
		parts[i] = tierWords(&v.Tiers[i])
	}
	return fmt.Sprintf("match %s: %s", v.Match, strings.Join(parts, "; "))
}
