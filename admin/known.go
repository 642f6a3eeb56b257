package admin

import (
	"cmp"
	"context"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// mostRules is how many rules, overrides or pauses a page lists.
const mostRules = 100

// list reads a part of the rules, and what time it is. A program without rules has none.
func (v *visit) list(ctx context.Context, query rules.ListQuery) (list rules.Listing, err error) {
	if v.store == nil {
		list.Now, err = v.reader.Now(ctx)
		return list, err
	}
	return v.store.List(ctx, query)
}

// limitOf returns the limit of this name as the code defines it, or else as the loaded rules do, and false if neither
// does.
func (h *Handler) limitOf(name string) (ratelimit.Limit, bool) {
	if limit, ok := h.defined[name]; ok {
		return limit, true
	}
	return h.set.Limit(name)
}

// policyLine is a policy of a limit, and where it comes from.
type policyLine struct {
	// Plan is the plan that it is for, and InCode whether it is the definition in the code.
	Plan   string
	InCode bool
	// Words describe the policy.
	Words string
	// Mode is "on", "shadow" or "off".
	Mode ratelimit.Mode
	// Ahead is whether it does not hold yet, and From when it does.
	Ahead bool
	From  time.Time
}

// policiesOf returns the policies of a limit. The policy in the code comes first.
func (h *Handler) policiesOf(name string, list *rules.Listing) (lines []policyLine) {
	if limit, ok := h.defined[name]; ok {
		lines = append(lines, policyLine{InCode: true, Words: limit.Policy().String(), Mode: ratelimit.On})
	}
	for i := range list.Rules {
		if r := &list.Rules[i]; r.Limit == name {
			lines = append(lines, policyLine{
				Plan: r.Plan, Words: r.Rule.Policy.String(), Mode: cmp.Or(r.Rule.Mode, ratelimit.On),
				From: r.From, Ahead: r.From.After(list.Now),
			})
		}
	}
	return lines
}

// pauseOf returns the pause of a bucket, or with the key "" of a limit, that holds or lies ahead.
func pauseOf(list *rules.Listing, limit, key string) *rules.Statement {
	for i := range list.Pauses {
		if p := &list.Pauses[i]; p.Limit == limit && p.Key == key {
			return p
		}
	}
	return nil
}
