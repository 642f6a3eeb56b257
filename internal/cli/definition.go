package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// definition is how a limit is defined in the code, as far as it was said.
type definition struct {
	plan, file            string
	kind                  string
	rate                  float64
	period                spanFlag
	capacity, maxReserved float64
	shards                int
	start                 instantFlag
	changed               func(flag string) bool
	read                  func(ctx context.Context, path string) (*rules.Document, error)
	document              *rules.Document // what the file says, once it is read
}

func (a *app) withDefinition(cmd *cobra.Command, d *definition) *cobra.Command {
	flags := cmd.Flags()
	d.changed, d.read = flags.Changed, a.wantedRules
	flags.StringVar(&d.plan, "plan", "", "plan that the key is on")
	flags.StringVarP(&d.file, "file", "f", "", "rules file that defines the limit where the tables do not; see ratelimit help policies; - is standard input")
	flags.StringVar(&d.kind, "kind", string(rules.TokenBucket), "how tokens arrive: token bucket or fixed window")
	flags.Float64Var(&d.rate, "rate", 0, "tokens that arrive each period")
	flags.Var(&d.period, "period", "period of the rate: 1m, hour, 7d")
	flags.Float64Var(&d.capacity, "capacity", 0, "most that the bucket holds; without it as much as the rate")
	flags.Float64Var(&d.maxReserved, "max-reserved", 0, "tokens that may be owed; without it no bound")
	flags.IntVar(&d.shards, "shards", 1, "rows of the bucket")
	flags.Var(&d.start, "start", "start of some window, as 2026-01-01T00:00:00Z")
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

// said reports whether flags say how the limit is defined.
func (d *definition) said() bool {
	return slices.ContainsFunc([]string{"kind", "rate", "period", "capacity", "max-reserved", "shards", "start"}, d.changed)
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
	case !d.changed("rate"), !d.changed("period"):
		return nil, "", misused("the definition lacks a rate or a period; give --rate and --period, such as --rate 10 --period 1m")
	}
	r = &rules.Rule{
		Limit: name, Kind: rules.Kind(strings.ReplaceAll(d.kind, "_", " ")), Rate: d.rate, Period: time.Duration(d.period),
		Shards: d.shards, Start: d.start.at,
	}
	if d.changed("capacity") {
		r.Capacity = &d.capacity
	}
	if d.changed("max-reserved") {
		r.MaxReserved = &d.maxReserved
	}
	return r, "flags", nil
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
