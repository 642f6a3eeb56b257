package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// validityView is whether a rules file is valid, for programs.
type validityView struct {
	File      string `json:"file"`
	Valid     bool   `json:"valid"`
	Says      string `json:"says,omitzero"` // the error
	Rules     int    `json:"rules"`
	Tiers     int    `json:"tiers"`
	Overrides int    `json:"overrides"`
}

func (a *app) rulesValidate() *cobra.Command {
	var path string
	cmd := a.command(cobra.Command{
		Use:   "validate",
		Short: "Check a rules file",
		Long: `Check a rules file, and print the first error with its line. It uses no database. It notes a capacity below
1, limits whose names differ only in case, tiers whose limits have no rule, and attributes that programs
must declare.`,
		Args:    noArguments,
		Example: "  ratelimit rules validate -f rules.yaml",
	}, func(ctx context.Context, _ []string) error {
		document, err := a.wantedRules(ctx, path)
		switch {
		case errors.Is(err, rules.ErrInvalid):
			if !a.isTable() {
				if err := a.show(validityView{File: path, Says: a.scrub(err.Error())}, nil); err != nil {
					return err
				}
			}
			return &exit{exitFault, err}
		case err != nil:
			return err
		}
		a.noteMistakes(document)
		v := validityView{path, true, "", len(document.Rules), len(document.Tiers.Tiers), len(document.Overrides)}
		return a.show(v, func(t *table) {
			t.row(fmt.Sprintf("valid: %s has %s, %s and %s", fileName(path), count(v.Rules, "rule"), count(v.Tiers, "tier"),
				count(v.Overrides, "override")))
		})
	}, "0 valid", "5 invalid")
	cmd.Flags().StringVarP(&path, "file", "f", "", "rules file, in YAML or JSON (required); - is standard input")
	return a.withOutput(cmd)
}

// noteMistakes notes valid entries of a rules file that are probably mistakes.
func (a *app) noteMistakes(d *rules.Document) {
	a.noteSmall(d)
	var limits []string
	for _, r := range d.Rules {
		limits = append(limits, r.Limit)
	}
	for _, t := range d.Tiers.Tiers {
		limits = append(limits, t.Limit)
	}
	for _, o := range d.Overrides {
		limits = append(limits, o.Limit)
	}
	slices.Sort(limits)
	folded := make(map[string]string) // limits by their names in lower case
	for _, limit := range slices.Compact(limits) {
		if other, ok := folded[strings.ToLower(limit)]; ok {
			a.note("the limits %q and %q differ only in case, and are two limits", other, limit)
		}
		folded[strings.ToLower(limit)] = limit
	}
	a.noteUndefined(d, nil)
	if attributes := d.Attributes(); len(attributes) > 0 {
		a.note("tiers name attributes that a program must declare in rules.SiteConfig: %s", strings.Join(attributes, ", "))
	}
}

// noteSmall notes the policies of a file that reject a request with the default cost. A capacity of none is for
// reservations.
func (a *app) noteSmall(d *rules.Document) {
	note := func(name string, policy ratelimit.Policy) {
		limit, err := ratelimit.NewLimit("noted", policy)
		if capacity := limit.Capacity(); err == nil && capacity > 0 && capacity < 1 {
			a.note("%s: its capacity is %v, so a request with the default cost of 1 is an error", name, capacity)
		}
	}
	for _, r := range d.Rules {
		note(fmt.Sprintf("rule %q, plan %q", r.Limit, r.Plan), r.Policy)
	}
	for _, o := range d.Overrides {
		if o.Policy != nil {
			note(fmt.Sprintf("override of %q, key %s", o.Limit, shown(keyText(o.Key))), o.Policy)
		}
	}
}

// noteUndefined notes the limits that tiers of a file name, and the plans that overrides name, if they have a rule
// neither in the file nor among the stored rules.
func (a *app) noteUndefined(d *rules.Document, stored []rules.Statement) {
	limits, ids := make(map[string]bool), make(map[rules.RuleID]bool)
	for _, r := range d.Rules {
		limits[r.Limit], ids[rules.RuleID{Limit: r.Limit, Plan: r.Plan}] = true, true
	}
	for _, s := range stored {
		limits[s.Limit], ids[rules.RuleID{Limit: s.Limit, Plan: s.Plan}] = true, true
	}
	var undefined []string
	for _, t := range d.Tiers.Tiers {
		if !limits[t.Limit] {
			undefined = append(undefined, t.Limit)
		}
	}
	slices.Sort(undefined)
	if undefined = slices.Compact(undefined); len(undefined) > 0 {
		a.note("tiers name limits that have no rule: %s; correct the names, add rules, or name the limits in "+
			"rules.SiteConfig of each program, which otherwise cannot start", strings.Join(undefined, ", "))
	}
	for _, o := range d.Overrides {
		if o.OnPlan != "" && !ids[rules.RuleID{Limit: o.Limit, Plan: o.OnPlan}] {
			a.note("the override of %q for the key %s is on plan %q, for which %q has no rule; correct the name, or add a rule",
				o.Limit, keyText(o.Key), o.OnPlan, o.Limit)
		}
	}
}
