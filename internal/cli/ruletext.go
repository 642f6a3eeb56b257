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

// policyView is a policy for programs.
type policyView struct {
	Kind        rules.Kind     `json:"kind"`
	Rate        float64        `json:"rate"`
	PeriodUs    int64          `json:"period_us"`
	Capacity    float64        `json:"capacity"`
	MaxReserved *float64       `json:"max_reserved"` // null: no bound
	Shards      int            `json:"shards"`
	Start       time.Time      `json:"start,omitzero"`
	Mode        ratelimit.Mode `json:"mode"`
}

// stored returns an instant as the tables keep it.
func stored(at time.Time) time.Time { return at.UTC().Truncate(time.Microsecond) }

// viewOf returns what a rule says, with the defaults written out.
func viewOf(r *rules.Rule) policyView {
	v := policyView{
		Kind: cmp.Or(r.Kind, rules.TokenBucket), Rate: r.Rate, PeriodUs: r.Period.Microseconds(), Capacity: r.Rate,
		MaxReserved: r.MaxReserved, Shards: cmp.Or(r.Shards, 1), Start: stored(r.Start), Mode: cmp.Or(r.Mode, ratelimit.On),
	}
	if r.Capacity != nil {
		v.Capacity = *r.Capacity
	}
	return v
}

// viewOfPolicy returns the numbers of a policy of a limit.
func viewOfPolicy(limit ratelimit.Limit) policyView {
	v := policyView{Kind: rules.TokenBucket, Capacity: limit.Capacity(), Mode: ratelimit.On}
	var reserved float64
	switch p := limit.Policy().(type) {
	case ratelimit.TokenBucket:
		v.Rate, v.PeriodUs, v.Shards, reserved = p.Rate, p.Period.Microseconds(), p.Shards, p.MaxReserved
	case ratelimit.FixedWindow:
		v.Kind, v.Rate, v.PeriodUs, v.Shards, v.Start, reserved = rules.FixedWindow, p.Rate, p.Period.Microseconds(), p.Shards, p.Start, p.MaxReserved
	}
	v.Shards = cmp.Or(v.Shards, 1)
	if reserved != 0 {
		v.MaxReserved = new(max(0, reserved)) // those below 0 are words for none
	}
	return v
}

// words returns a policy for people: 10 per minute, capacity 50.
func (v policyView) words() string {
	parts := []string{fmt.Sprintf("%s per %s", number(v.Rate), spanWord(time.Duration(v.PeriodUs)*time.Microsecond))}
	if v.Capacity != v.Rate {
		parts = append(parts, "capacity "+number(v.Capacity))
	}
	if v.Kind != rules.TokenBucket {
		parts = append(parts, string(v.Kind))
	}
	if !v.Start.IsZero() {
		parts = append(parts, "a window starts at "+instant(v.Start))
	}
	if v.MaxReserved != nil {
		parts = append(parts, "up to "+number(*v.MaxReserved)+" owed")
	}
	if v.Shards > 1 {
		parts = append(parts, fmt.Sprintf("%d shards", v.Shards))
	}
	if v.Mode != ratelimit.On {
		parts = append(parts, "mode "+string(v.Mode))
	}
	return strings.Join(parts, ", ")
}

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
