package rules

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/words"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// String returns the statement for people: "10 per minute, capacity 50", or "removed".
func (s Statement) String() string {
	switch {
	case s.Err != nil:
		return "cannot be read: " + s.Err.Error()
	case s.Rule != nil:
		return s.Rule.String()
	case s.Override != nil:
		return s.Override.String()
	case s.Pause != nil:
		return "paused until " + second(s.Pause.Until)
	case s.Tiers != nil:
		return s.Tiers.String()
	}
	return "removed"
}

// String returns the rule for people, without its limit and plan.
func (r Rule) String() string {
	parts := partsOf(r.Policy, r.Mode, r.OnChange)
	if r.Unit != "" {
		parts = append(parts, "unit "+r.Unit)
	}
	if r.Description != "" {
		parts = append(parts, fmt.Sprintf("description %q", r.Description))
	}
	return strings.Join(parts, ", ")
}

// partsOf returns the policy of a rule or an override for people, and the words beside it that are not the default.
func partsOf(policy ratelimit.Policy, mode ratelimit.Mode, change ratelimit.OnChange) (parts []string) {
	if policy != nil {
		parts = append(parts, policy.String())
	}
	if cmp.Or(mode, ratelimit.On) != ratelimit.On {
		parts = append(parts, "mode "+string(mode))
	}
	if change != "" {
		parts = append(parts, "on change "+string(change))
	}
	return parts
}

// String returns the override for people, without its limit and key.
func (o Override) String() string {
	parts := partsOf(o.Policy, o.Mode, o.OnChange)
	switch {
	case o.OnPlan != "":
		parts = slices.Insert(parts, 0, "as on plan "+o.OnPlan)
	case o.Policy == nil:
		parts = slices.Insert(parts, 0, words.Number(o.Multiplier)+" times")
	}
	if !o.Until.IsZero() {
		parts = append(parts, "until "+second(o.Until))
	}
	return strings.Join(parts, ", ")
}

// second returns an instant for people.
func second(at time.Time) string { return at.UTC().Format("2006-01-02 15:04:05Z") }

// String returns the tiers for people.
func (s TierSet) String() string {
	if len(s.Tiers) == 0 {
		return "no tiers"
	}
	parts := make([]string, len(s.Tiers))
	for i := range s.Tiers {
		parts[i] = s.Tiers[i].String()
	}
	return fmt.Sprintf("match %s: %s", cmp.Or(s.Match, MatchAll), strings.Join(parts, "; "))
}

// String returns the tier for people.
func (t Tier) String() string {
	parts := []string{t.Limit + " by " + cmp.Or(t.Key, "nothing (shared)")}
	if t.Route != "" {
		parts = append(parts, "at "+t.Route)
	}
	for _, name := range slices.Sorted(maps.Keys(t.When)) {
		parts = append(parts, fmt.Sprintf("when %s is %q", name, t.When[name]))
	}
	switch {
	case cmp.Or(t.CostSource, "fixed") != "fixed":
		parts = append(parts, fmt.Sprintf("cost from %s, else %s", t.CostSource, words.Number(cmp.Or(t.DefaultCost, 1))))
	case cmp.Or(t.FixedCost, 1) != 1:
		parts = append(parts, "cost "+words.Number(t.FixedCost))
	}
	return strings.Join(parts, ", ")
}
