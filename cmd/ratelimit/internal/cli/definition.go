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

// definition is how a limit is defined in the code, as far as it was said.
type definition struct {
	plan, file, policy string
	noPlan             bool
	read               func(ctx context.Context, path string) (*rules.Document, error)
	document           *rules.Document // what the file says, once it is read
	plans              []string        // plans with a rule in the tables or in the file, once choosePlan knows them
}

func (a *app) withDefinition(cmd *cobra.Command, d *definition) *cobra.Command {
	a.withDefinitionFile(cmd, d)
	cmd.Flags().StringVar(&d.policy, "policy", "", "definition in the code, such as 'rate: 10, period: minute'; see "+
		"ratelimit help policies")
	cmd.MarkFlagsMutuallyExclusive("file", "policy")
	return cmd
}

// withDefinitionFile is withDefinition for a command that takes a definition from a file only.
func (a *app) withDefinitionFile(cmd *cobra.Command, d *definition) *cobra.Command {
	d.read = a.wantedRules
	cmd.Flags().StringVarP(&d.file, "file", "f", "", "rules file with the definition of the limit, if the tables have "+
		"none; - is standard input; see ratelimit help policies")
	return cmd
}

// errNoDefinition is returned where nothing says how a limit is defined.
var errNoDefinition = errors.New("no definition is given")

// of returns the definition of the limit of this name, and its source. Without a definition it returns errNoDefinition.
func (d *definition) of(ctx context.Context, name, storedKey string) (limit ratelimit.Limit, from string, err error) {
	rule, from, err := d.rule(ctx, name, storedKey)
	if err != nil {
		return ratelimit.Limit{}, "", err
	}
	if limit, err = rule.AsLimit(); err != nil {
		return ratelimit.Limit{}, "", misused("%w", err)
	}
	return limit, from, nil
}

// check returns an error if the definition is invalid for every bucket.
func (d *definition) check(ctx context.Context, name string) error {
	if d.file != "" {
		return d.load(ctx)
	}
	rule, _, err := d.rule(ctx, name, "")
	switch {
	case errors.Is(err, errNoDefinition):
		return nil
	case err != nil:
		return err
	}
	if _, err := rule.AsLimit(); err != nil {
		return misused("%w", err)
	}
	return nil
}

// choosePlan returns an error where the limit has rules for plans, in the tables or in the file, and the flags do not
// choose one of them: under the rule of another plan a command would cut the bucket to that rule's capacity.
func (d *definition) choosePlan(name string, stored []string) error {
	d.plans = stored
	if d.document != nil {
		for i := range d.document.Rules {
			if r := &d.document.Rules[i]; r.Limit == name && r.Plan != "" && !slices.Contains(d.plans, r.Plan) {
				d.plans = append(d.plans, r.Plan)
			}
		}
	}
	if d.noPlan || len(d.plans) == 0 || slices.Contains(d.plans, d.plan) {
		return nil
	}
	return fmt.Errorf("the limit %q has rules for these plans: %s; give --plan with the one that the key is on, or "+
		"--no-plan if it is on none of them", name, strings.Join(d.plans, ", "))
}

func (d *definition) rule(ctx context.Context, name, storedKey string) (r *rules.Rule, from string, err error) {
	switch {
	case d.file != "":
		return d.ruleOfFile(ctx, name, storedKey)
	case d.policy == "":
		return nil, "", errNoDefinition
	}
	policy, err := parsePolicy(d.policy)
	if err != nil {
		return nil, "", err
	}
	return &rules.Rule{Limit: name, Policy: policy}, "--policy", nil
}

// parsePolicy returns what --policy says.
func parsePolicy(text string) (ratelimit.Policy, error) {
	policy, err := rules.ParsePolicy(text)
	if err != nil {
		return nil, misused("--policy %.200q: %s; write it as in a rules file, such as 'rate: 10, period: minute'", text,
			strings.TrimPrefix(err.Error(), rules.ErrInvalid.Error()+": "))
	}
	return policy, nil
}

// ruleOfFile returns the rule of the file for the plan, or else that for every plan.
func (d *definition) ruleOfFile(ctx context.Context, name, storedKey string) (r *rules.Rule, from string, err error) {
	if err := d.load(ctx); err != nil {
		return nil, "", err
	}
	for i := range d.document.Overrides {
		if o := &d.document.Overrides[i]; o.Limit == name && o.Key == storedKey {
			return nil, "", misused("%s has an override for this key, which counts once it is stored; run ratelimit rules "+
				"apply, or say with --policy what the key has", fileName(d.file))
		}
	}
	for i := range d.document.Rules {
		if c := &d.document.Rules[i]; c.Limit == name && (c.Plan == d.plan || c.Plan == "" && r == nil) {
			r = c
		}
	}
	switch {
	case r != nil && r.Mode != "" && r.Mode != ratelimit.On:
		return nil, "", misused("the rule of %s has the mode %s, which counts once it is stored; run ratelimit rules apply",
			fileName(d.file), r.Mode)
	case r == nil:
		return nil, "", fmt.Errorf("%w: %s has no rule for the limit %q and the plan %q", errNoDefinition, fileName(d.file),
			name, d.plan)
	}
	return r, fileName(d.file), nil
}

// load reads the file, once.
func (d *definition) load(ctx context.Context) (err error) {
	if d.document == nil {
		d.document, err = d.read(ctx, d.file)
	}
	return err
}

// plansOf returns a limit as the file defines it for each of its plans.
func (d *definition) plansOf(ctx context.Context, name string) (limits []ratelimit.Limit, err error) {
	if d.file == "" {
		return nil, nil
	}
	if err := d.load(ctx); err != nil {
		return nil, err
	}
	for i := range d.document.Rules {
		r := &d.document.Rules[i]
		if r.Limit != name {
			continue
		}
		limit, err := r.AsLimit()
		if err != nil {
			return nil, misused("%w", err)
		}
		limits = append(limits, limit)
	}
	return limits, nil
}
