package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

func (a *app) rulesCommands() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "rules",
		Short: "Show and change the policies that are in tables",
		Long: `Show and change the policies that are in tables: rules of limits and plans, tiers, overrides of keys and pauses. Keep
them in a YAML file in git, look at the difference, and apply it. go doc rules.Document has the fields of the file.`,
	}
	cmd.AddCommand(a.rulesList(), a.rulesGet(), a.rulesValidate(), a.rulesDiff(), a.rulesApply(), a.rulesHistory(), a.rulesConvert())
	asGroup(cmd)
	return cmd
}

// listingView is what the tables say, for programs.
type listingView struct {
	Version   int64           `json:"version"`
	Rules     []*ruleView     `json:"rules"`
	Overrides []*overrideView `json:"overrides"`
	Pauses    []pauseView     `json:"pauses"`
	Tiers     *tiersView      `json:"tiers"`
}

// listingViewOf returns what a listing says at now. Overrides and pauses that are over are left out.
func listingViewOf(list *rules.Listing, now time.Time) *listingView {
	v := &listingView{Version: list.Version, Rules: []*ruleView{}, Overrides: []*overrideView{}, Pauses: []pauseView{}, Tiers: tiersViewOf(&list.Tiers)}
	for i := range list.Rules {
		r := ruleViewOf(&list.Rules[i].Rule)
		r.Version, r.From = list.Rules[i].Version, list.Rules[i].From
		v.Rules = append(v.Rules, r)
	}
	for i := range list.Overrides {
		if o := &list.Overrides[i]; o.Until.IsZero() || o.Until.After(now) {
			v.Overrides = append(v.Overrides, overrideViewOf(&o.Override, o.Edit))
		}
	}
	for _, p := range list.Pauses {
		if p.Until.After(now) {
			v.Pauses = append(v.Pauses, pauseView{p.Limit, p.Key, p.Until, p.From, p.Author, p.Reason})
		}
	}
	return v
}

// of returns what the view says of one limit.
func (v *listingView) of(limit string) *listingView {
	w := &listingView{Version: v.Version, Rules: []*ruleView{}, Overrides: []*overrideView{}, Pauses: []pauseView{}, Tiers: &tiersView{v.Tiers.Match, []rules.Tier{}}}
	for _, r := range v.Rules {
		if r.Limit == limit {
			w.Rules = append(w.Rules, r)
		}
	}
	for _, o := range v.Overrides {
		if o.Limit == limit {
			w.Overrides = append(w.Overrides, o)
		}
	}
	for _, p := range v.Pauses {
		if p.Limit == limit {
			w.Pauses = append(w.Pauses, p)
		}
	}
	for _, t := range v.Tiers.Tiers {
		if t.Limit == limit {
			w.Tiers.Tiers = append(w.Tiers.Tiers, t)
		}
	}
	return w
}

// names says which limits the tables know, for who has misspelt one.
func (v *listingView) names() string {
	var names []string
	for _, r := range v.Rules {
		names = append(names, r.Limit)
	}
	for _, o := range v.Overrides {
		names = append(names, o.Limit)
	}
	slices.Sort(names)
	names = slices.Compact(names)
	switch {
	case len(names) == 0:
		return "they have no rules at all"
	case len(names) > mostNames:
		return fmt.Sprintf("they know %s and %d others", strings.Join(names[:mostNames], ", "), len(names)-mostNames)
	}
	return "they know " + strings.Join(names, ", ")
}

// mostNames is how many names of limits an error names.
const mostNames = 10

// print prints the view: as JSON, or as tables, one behind the other, and those that are empty not at all.
func (v *listingView) print(a *app, now time.Time) error {
	if !a.isTable() {
		return a.show(v, nil)
	}
	var tables []*table
	add := func(rows int, fill func(t *table)) {
		if rows > 0 {
			t := &table{}
			fill(t)
			tables = append(tables, t)
		}
	}
	add(len(v.Rules), func(t *table) {
		t.row("LIMIT", "PLAN", "RULE", "VERSION", "FROM")
		for _, r := range v.Rules {
			t.row(r.Limit, dash(r.Plan), r.words(), fmt.Sprint(r.Version), instantFrom(r.From, now))
		}
	})
	add(len(v.Overrides), func(t *table) {
		t.row("OVERRIDE OF", "KEY", "HAS", "FROM", "AUTHOR", "REASON")
		for _, o := range v.Overrides {
			t.row(o.Limit, keyText(o.Key), o.words(), instantFrom(o.From, now), o.Author, o.Reason)
		}
	})
	add(len(v.Pauses), func(t *table) {
		t.row("PAUSE OF", "KEY", "UNTIL", "AUTHOR", "REASON")
		for _, p := range v.Pauses {
			t.row(p.Limit, keyOrAll(p.Key), instantFrom(p.Until, now), p.Author, p.Reason)
		}
	})
	add(len(v.Tiers.Tiers), func(t *table) {
		t.row("TIER (match " + string(v.Tiers.Match) + ")")
		for i := range v.Tiers.Tiers {
			t.row(tierWords(&v.Tiers.Tiers[i]))
		}
	})
	if len(tables) == 0 {
		_, err := fmt.Fprintln(a.out, "no rules, overrides, pauses or tiers")
		return err
	}
	for i, t := range tables {
		if i > 0 {
			fmt.Fprintln(a.out)
		}
		if err := t.write(a.out); err != nil {
			return err
		}
	}
	return nil
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// listing reads what the tables say, and what time it is for the database.
func (db *database) listing(ctx context.Context) (rules.Listing, time.Time, error) {
	list, err := db.store.List(ctx)
	if err != nil {
		return rules.Listing{}, time.Time{}, err
	}
	now, err := db.reader.Now(ctx)
	return list, now, err
}

func (a *app) rulesList() *cobra.Command {
	cmd := a.command(cobra.Command{
		Use:   "list",
		Short: "Show all rules, overrides, pauses and tiers",
		Long: `Show all rules, overrides, pauses and tiers that hold now or lie ahead. With -o yaml it prints the rules, overrides and
tiers, as they were stated last, as a file that apply reads: a start for keeping them in git. Pauses are not in such a file.`,
		Args:    noArguments,
		Example: "  ratelimit rules list -o yaml > rules.yaml",
	}, func(ctx context.Context, _ []string) error {
		return a.withDatabase(ctx, func(ctx context.Context, db *database) error {
			list, now, err := db.listing(ctx)
			if err != nil {
				return err
			}
			if list.Err != nil && a.options.format == asYAML {
				return fmt.Errorf("the file would not have all rules: %w", list.Err)
			}
			if list.Err != nil {
				a.note("what this version of the program cannot read is not shown: %v", list.Err)
			}
			if a.options.format == asYAML {
				file, err := documentOf(&list, now).YAML()
				if err == nil {
					_, err = a.out.Write(file)
				}
				return err
			}
			v, err := db.withAhead(ctx, &list, now, "")
			if err != nil {
				return err
			}
			return v.print(a, now)
		})
	})
	return a.withOutput(cmd)
}

// documentOf returns what a listing says as a file. Of the overrides of a key that lie ahead it has the last.
func documentOf(list *rules.Listing, now time.Time) *rules.Document {
	d := &rules.Document{}
	for i := range list.Rules {
		d.Rules = append(d.Rules, list.Rules[i].Rule)
	}
	if len(list.Tiers.Tiers) > 0 {
		d.Tiers = list.Tiers
	}
	for i := range list.Overrides {
		o := list.Overrides[i].Override
		if !o.Until.IsZero() && !o.Until.After(now) {
			continue
		}
		if n := len(d.Overrides); n > 0 && d.Overrides[n-1].Limit == o.Limit && d.Overrides[n-1].Key == o.Key {
			d.Overrides[n-1] = o
			continue
		}
		d.Overrides = append(d.Overrides, o)
	}
	return d
}

func (a *app) rulesGet() *cobra.Command {
	cmd := a.command(cobra.Command{
		Use:     "get LIMIT",
		Short:   "Show the rules, overrides, pauses and tiers of a limit",
		Long:    "Show the rules, overrides, pauses and tiers of a limit. get without rules shows a bucket.",
		Args:    oneArgument("a LIMIT"),
		Example: "  ratelimit rules get sendMessage",
	}, func(ctx context.Context, args []string) error {
		if _, err := ratelimit.NewLimit(args[0], ratelimit.PerSecond(1)); err != nil {
			return err
		}
		return a.withDatabase(ctx, func(ctx context.Context, db *database) error {
			list, now, err := db.listing(ctx)
			if err != nil {
				return err
			}
			v, err := db.withAhead(ctx, &list, now, args[0])
			if err != nil {
				return err
			}
			of := v.of(args[0])
			if len(of.Rules)+len(of.Overrides)+len(of.Pauses)+len(of.Tiers.Tiers) == 0 {
				return &exit{exitNotFound, fmt.Errorf("the tables say nothing of a limit %q; %s", args[0], v.names())}
			}
			return of.print(a, now)
		})
	}, "0 done", "6 the tables say nothing of the limit")
	return a.withOutput(cmd)
}
