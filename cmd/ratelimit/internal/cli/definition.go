package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/internal/fields"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// definition is how a limit is defined in the code, as far as it was said.
type definition struct {
	plan, file string
	noPlan     bool
	fields     map[string]*string // of the policy, by their flags
	changed    func(flag string) bool
	read       func(ctx context.Context, path string) (*rules.Document, error)
	document   *rules.Document // what the file says, once it is read
	plans      []string        // plans with a rule in the tables or in the file, once choosePlan knows them
}

// policyFlags returns the flags for the fields of a policy, with their help.
func policyFlags() map[string]string {
	return map[string]string{
		"kind":          "how tokens arrive: token bucket, fixed window, sliding window, calendar window or concurrency; without it token bucket",
		"rate":          "tokens that arrive each period",
		"period":        "period of the rate: 1m, hour, 7d",
		"capacity":      "most that the bucket holds; without it as much as the rate",
		"max-reserved":  "tokens that may be owed; without it no bound",
		"shards":        "rows of the bucket; without it 1",
		"start":         "start of some fixed window, as 2026-01-01T00:00:00Z",
		"slices":        "parts that a sliding window counts its period in; without it 60",
		"resets":        "calendar window: day, week, month, quarter or year",
		"zone":          "time zone of a calendar window; without it UTC",
		"first-weekday": "day on which the week of a calendar window begins; without it sunday",
		"first-day":     "day of the month on which a calendar window begins; without it 1",
		"first-month":   "month in which the quarter or year of a calendar window begins; without it january",
		"most":          "slots of a concurrency",
		"lease":         "how long a slot of a concurrency is held; without it 1m",
	}
}

func (a *app) withDefinition(cmd *cobra.Command, d *definition) *cobra.Command {
	a.withDefinitionFile(cmd, d)
	for name, help := range policyFlags() {
		d.fields[name] = cmd.Flags().String(name, "", help)
	}
	return cmd
}

// withDefinitionFile is withDefinition for a command that takes a definition from a file only.
func (a *app) withDefinitionFile(cmd *cobra.Command, d *definition) *cobra.Command {
	d.changed, d.read, d.fields = cmd.Flags().Changed, a.wantedRules, make(map[string]*string)
	cmd.Flags().StringVarP(&d.file, "file", "f", "", "rules file that defines the limit where the tables do not; see ratelimit help policies; - is standard input")
	return cmd
}

// errNoDefinition is returned where nothing says how a limit is defined.
var errNoDefinition = errors.New("nothing says how it is defined")

// of returns the limit of a name as it is defined, and what says so. It returns errNoDefinition where nothing does.
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

// check returns an error where what is said cannot be, whichever bucket is meant.
func (d *definition) check(ctx context.Context, name string) error {
	if d.file != "" && !d.said() {
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

// choosePlan returns an error where the limit has rules for plans, in the tables or in the file, and the flags do not choose one
// of them: under the rule of another plan a command would cut the bucket to that rule's capacity.
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
	return fmt.Errorf("the limit %q has rules for these plans: %s; give --plan with the one that the key is on, or --no-plan if it is on none of them", name, strings.Join(d.plans, ", "))
}

// said reports whether flags say how the limit is defined.
func (d *definition) said() bool {
	return slices.ContainsFunc(slices.Collect(maps.Keys(d.fields)), d.changed)
}

func (d *definition) rule(ctx context.Context, name, storedKey string) (r *rules.Rule, from string, err error) {
	said := d.said()
	switch {
	case said && d.file != "":
		return nil, "", misused("both -f and flags say how the limit is defined; use one of them")
	case d.file != "":
		return d.ruleOfFile(ctx, name, storedKey)
	case !said:
		return nil, "", errNoDefinition
	}
	policy, err := d.policy()
	if err != nil {
		if wrong, ok := errors.AsType[*fields.Error](err); ok {
			err = fmt.Errorf("--%s %s", strings.ReplaceAll(wrong.Field, "_", "-"), wrong.Problem)
		}
		return nil, "", misused("%w; define a limit by flags such as --rate 10 --period 1m, --kind concurrency --most 5, or --rate 1000 --kind 'calendar window' --resets month", err)
	}
	return &rules.Rule{Limit: name, Policy: policy}, "flags", nil
}

// policy returns the policy that the flags say. Each flag is a field of a policy in a rules file.
func (d *definition) policy() (ratelimit.Policy, error) {
	said := make(map[string]any)
	for name, text := range d.fields {
		if !d.changed(name) {
			continue
		}
		said[strings.ReplaceAll(name, "-", "_")] = *text
		if json.Valid([]byte(*text)) {
			said[strings.ReplaceAll(name, "-", "_")] = json.RawMessage(*text)
		}
	}
	for _, word := range []string{"kind", "first_weekday", "first_month"} {
		if text, ok := said[word].(string); ok {
			said[word] = strings.ToLower(strings.ReplaceAll(text, "_", " "))
		}
	}
	data, err := json.Marshal(said)
	if err != nil {
		return nil, err
	}
	return ratelimit.UnmarshalPolicy(data)
}

// ruleOfFile returns the rule of the file for the plan, or else that for every plan.
func (d *definition) ruleOfFile(ctx context.Context, name, storedKey string) (r *rules.Rule, from string, err error) {
	if err := d.load(ctx); err != nil {
		return nil, "", err
	}
	for i := range d.document.Overrides {
		if o := &d.document.Overrides[i]; o.Limit == name && o.Key == storedKey {
			return nil, "", misused("%s has an override for this key, which counts once it is stored; run ratelimit rules apply, or say with --rate and --period what the key has", fileName(d.file))
		}
	}
	for i := range d.document.Rules {
		if c := &d.document.Rules[i]; c.Limit == name && (c.Plan == d.plan || c.Plan == "" && r == nil) {
			r = c
		}
	}
	switch {
	case r != nil && r.Mode != "" && r.Mode != ratelimit.On:
		return nil, "", misused("the rule of %s has the mode %s, which counts once it is stored; run ratelimit rules apply", fileName(d.file), r.Mode)
	case r == nil:
		return nil, "", fmt.Errorf("%w: %s has no rule for the limit %q and the plan %q", errNoDefinition, fileName(d.file), name, d.plan)
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
