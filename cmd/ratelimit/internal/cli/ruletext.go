package cli

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// ruleView is a rule for programs.
type ruleView struct {
	Limit string `json:"limit"`
	Plan  string `json:"plan"`
	policyView
	OnChange    ratelimit.OnChange `json:"on_change"`
	Unit        string             `json:"unit"`
	Description string             `json:"description"`
	Version     int64              `json:"version,omitzero"` // 0: not stored yet, or written by hand
	From        time.Time          `json:"from,omitzero"`
	Until       time.Time          `json:"until,omitzero"` // when a change holds that lies ahead
}

func ruleViewOf(r *rules.Rule) *ruleView {
	return &ruleView{
		Limit: r.Limit, Plan: r.Plan, policyView: viewOf(r), OnChange: cmp.Or(r.OnChange, ratelimit.KeepTokens),
		Unit: r.Unit, Description: r.Description,
	}
}

// words returns the rule for people, without its limit and plan.
func (v *ruleView) words() string {
	text := v.policyView.words()
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

// overrideView is the override of a key for programs.
type overrideView struct {
	Limit      string             `json:"limit"`
	Key        string             `json:"key"`
	Multiplier float64            `json:"multiplier,omitzero"`
	OnPlan     string             `json:"on_plan,omitzero"`
	Policy     *policyView        `json:"policy,omitempty"`
	OnChange   ratelimit.OnChange `json:"on_change"`
	Until      time.Time          `json:"until,omitzero"`
	From       time.Time          `json:"from,omitzero"`
	Author     string             `json:"author,omitzero"`
	Reason     string             `json:"reason,omitzero"`
}

func overrideViewOf(o *rules.Override, edit rules.Edit) *overrideView {
	v := &overrideView{
		Limit: o.Limit, Key: o.Key, Multiplier: o.Multiplier, OnPlan: o.OnPlan, OnChange: cmp.Or(o.OnChange, ratelimit.KeepTokens),
		Until: stored(o.Until), From: edit.From, Author: edit.Author, Reason: edit.Reason,
	}
	if o.Policy != nil {
		v.Policy = new(viewOf(o.Policy))
	}
	return v
}

// words returns the override for people, without its limit and key.
func (v *overrideView) words() string {
	var parts []string
	switch {
	case v.Policy != nil:
		parts = append(parts, v.Policy.words())
	case v.OnPlan != "":
		parts = append(parts, "as on plan "+v.OnPlan)
	default:
		parts = append(parts, number(v.Multiplier)+" times")
	}
	if v.OnChange != ratelimit.KeepTokens {
		parts = append(parts, "on change "+string(v.OnChange))
	}
	if !v.Until.IsZero() {
		parts = append(parts, "until "+instant(v.Until))
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

// tierView is a tier for programs.
type tierView struct {
	Limit       string            `json:"limit"`
	Key         string            `json:"key"` // empty: the bucket that everybody shares
	Endpoint    string            `json:"endpoint"`
	When        map[string]string `json:"when"`
	CostSource  string            `json:"cost_source"`
	FixedCost   float64           `json:"fixed_cost"`
	DefaultCost float64           `json:"default_cost"`
}

// tiersView is the list of tiers for programs.
type tiersView struct {
	Match rules.Match `json:"match"`
	Tiers []tierView  `json:"tiers"`
}

func tiersViewOf(set *rules.TierSet) *tiersView {
	v := &tiersView{Match: cmp.Or(set.Match, rules.MatchAll), Tiers: []tierView{}}
	for _, t := range set.Tiers {
		if t.When == nil {
			t.When = map[string]string{}
		}
		v.Tiers = append(v.Tiers, tierView{
			Limit: t.Limit, Key: t.Key, Endpoint: t.Endpoint, When: t.When, CostSource: cmp.Or(t.CostSource, "fixed"),
			FixedCost: cmp.Or(t.FixedCost, 1), DefaultCost: cmp.Or(t.DefaultCost, 1),
		})
	}
	return v
}

// words returns the tier for people.
func (t tierView) words() string {
	parts := []string{t.Limit + " by " + cmp.Or(t.Key, "nothing (shared)")}
	if t.Endpoint != "" {
		parts = append(parts, "at "+t.Endpoint)
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
	for i, t := range v.Tiers {
		parts[i] = t.words()
	}
	return fmt.Sprintf("match %s: %s", v.Match, strings.Join(parts, "; "))
}
