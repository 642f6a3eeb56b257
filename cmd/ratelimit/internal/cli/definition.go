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
	noPlan                bool
	kind                  string
	rate                  float64
	period                spanFlag
	capacity, maxReserved float64
	shards                int
	start                 instantFlag
	slices, most          int
	lease                 spanFlag
	resets, zone          string
	firstWeekday          string
	firstDay              int
	firstMonth            string
	changed               func(flag string) bool
	read                  func(ctx context.Context, path string) (*rules.Document, error)
	document              *rules.Document // what the file says, once it is read
	plans                 []string        // plans with a rule in the tables or in the file, once choosePlan knows them
}

func (a *app) withDefinition(cmd *cobra.Command, d *definition) *cobra.Command {
	flags := cmd.Flags()
	d.changed, d.read = flags.Changed, a.wantedRules
	flags.StringVarP(&d.file, "file", "f", "", "rules file that defines the limit where the tables do not; see ratelimit help policies; - is standard input")
	flags.StringVar(&d.kind, "kind", string(rules.TokenBucket), "how tokens arrive: token bucket, fixed window, sliding window, calendar window or concurrency")
	flags.Float64Var(&d.rate, "rate", 0, "tokens that arrive each period")
	flags.Var(&d.period, "period", "period of the rate: 1m, hour, 7d")
	flags.Float64Var(&d.capacity, "capacity", 0, "most that the bucket holds; without it as much as the rate")
	flags.Float64Var(&d.maxReserved, "max-reserved", 0, "tokens that may be owed; without it no bound")
	flags.IntVar(&d.shards, "shards", 1, "rows of the bucket")
	flags.Var(&d.start, "start", "start of some fixed window, as 2026-01-01T00:00:00Z")
	flags.IntVar(&d.slices, "slices", 0, "parts that a sliding window counts its period in; without it 60")
	flags.StringVar(&d.resets, "resets", "", "calendar window: day, week, month, quarter or year")
	flags.StringVar(&d.zone, "zone", "", "time zone of a calendar window; without it UTC")
	flags.StringVar(&d.firstWeekday, "first-weekday", "", "day on which the week of a calendar window begins; without it sunday")
	flags.IntVar(&d.firstDay, "first-day", 0, "day of the month on which a calendar window begins; without it 1")
	flags.StringVar(&d.firstMonth, "first-month", "", "month in which the quarter or year of a calendar window begins; without it january")
	flags.IntVar(&d.most, "most", 0, "slots of a concurrency")
	flags.Var(&d.lease, "lease", "how long a slot of a concurrency is held; without it 1m")
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
	return slices.ContainsFunc([]string{
		"kind", "rate", "period", "capacity", "max-reserved", "shards", "start", "slices", "resets", "zone", "first-weekday", "first-day",
		"first-month", "most", "lease",
	}, d.changed)
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
	kind := rules.Kind(strings.ReplaceAll(d.kind, "_", " "))
	if err := d.isWhole(kind); err != nil {
		return nil, "", err
	}
	r = &rules.Rule{
		Limit: name, Kind: kind, Rate: d.rate, Period: time.Duration(d.period), Shards: d.shards, Start: d.start.at, Slices: d.slices,
		Resets: ratelimit.Calendar(d.resets), Zone: d.zone, FirstDay: d.firstDay, Most: d.most, Lease: time.Duration(d.lease),
	}
	if r.FirstWeekday, err = named[time.Weekday]("--first-weekday", d.firstWeekday, time.Sunday, time.Saturday); err != nil {
		return nil, "", err
	}
	if r.FirstMonth, err = named[time.Month]("--first-month", d.firstMonth, time.January, time.December); err != nil {
		return nil, "", err
	}
	if d.changed("capacity") {
		r.Capacity = &d.capacity
	}
	if d.changed("max-reserved") {
		r.MaxReserved = &d.maxReserved
	}
	return r, "flags", nil
}

// isWhole returns an error where flags say less of a kind than there has to be.
func (d *definition) isWhole(kind rules.Kind) error {
	switch {
	case kind == "adaptive":
		return misused("--kind is adaptive, which flags cannot define; write a rule with adaptive: {} in a file, and give it with -f")
	case kind == rules.Concurrency && !d.changed("most"):
		return misused("the definition lacks how many slots there are; give --most, such as --kind concurrency --most 5")
	case kind == rules.CalendarWindow && (!d.changed("rate") || !d.changed("resets")):
		return misused("the definition lacks a rate, or how long a window is; give --rate and --resets, such as --rate 1000 --resets month --zone Europe/Berlin")
	case kind != rules.Concurrency && kind != rules.CalendarWindow && (!d.changed("rate") || !d.changed("period")):
		return misused("the definition lacks a rate or a period; give --rate and --period, such as --rate 10 --period 1m")
	}
	return nil
}

// named returns the day or the month of a name, and the zero value for none.
func named[T interface {
	~int
	fmt.Stringer
}](flag, name string, first, last T) (found T, err error) {
	if name == "" {
		return found, nil
	}
	for found = first; found <= last; found++ {
		if strings.EqualFold(found.String(), name) {
			return found, nil
		}
	}
	return 0, misused("%s is %.40q; write out its name, such as %s", flag, name, strings.ToLower(last.String()))
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
