package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

func (a *app) rulesCommands() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "rules",
		Short: "Show and change the stored rules",
		Long: `Show and change the stored rules of limits and plans, and tiers, overrides and pauses. Keep them in a YAML
file in git, look at the difference, and apply it. go doc rules.Document lists the file's fields.`,
	}
	cmd.AddCommand(a.rulesList(), a.rulesGet(), a.rulesValidate(), a.rulesDiff(), a.rulesApply(), a.rulesDelete(),
		a.rulesHistory(), a.rulesRevert())
	asGroup(cmd)
	return cmd
}

// ofLimit returns what a listing says of one limit.
func ofLimit(list *rules.Listing, limit string) *rules.Listing {
	of := func(s rules.Statement) bool { return s.Limit != limit }
	l := *list
	l.Rules, l.Overrides = slices.DeleteFunc(slices.Clone(list.Rules), of),
		slices.DeleteFunc(slices.Clone(list.Overrides), of)
	l.Pauses = slices.DeleteFunc(slices.Clone(list.Pauses), of)
	l.Tiers.Tiers = slices.DeleteFunc(slices.Clone(list.Tiers.Tiers), func(t rules.Tier) bool { return t.Limit != limit })
	return &l
}

// rulesOf returns what the tables have about one limit, or an error if that is nothing.
func (db *database) rulesOf(ctx context.Context, limit string) (*rules.Listing, error) {
	list, err := db.store.List(ctx, rules.ListQuery{})
	of := ofLimit(&list, limit)
	if err == nil && len(of.Rules)+len(of.Overrides)+len(of.Pauses)+len(of.Tiers.Tiers) == 0 {
		err = notFound("the tables have nothing about a limit %q; %s", limit, namesIn(&list))
	}
	return of, err
}

// namesIn lists the limits of a listing, for a user with a misspelt name.
func namesIn(list *rules.Listing) string {
	var names []string
	for _, s := range slices.Concat(list.Rules, list.Overrides) {
		names = append(names, s.Limit)
	}
	slices.Sort(names)
	names = slices.Compact(names)
	switch {
	case len(names) == 0:
		return "no limit has a rule"
	case len(names) > mostNames:
		return fmt.Sprintf("the limits with rules are %s and %d others", strings.Join(names[:mostNames], ", "),
			len(names)-mostNames)
	}
	return "the limits with rules are " + strings.Join(names, ", ")
}

// mostNames is how many names of limits an error names.
const mostNames = 10

// showListing prints a listing: as a rules file in JSON or YAML, or as tables without the empty ones.
func (a *app) showListing(list *rules.Listing) error {
	switch {
	case !a.isTable() && list.Err != nil:
		return fmt.Errorf("the file would not have all rules: %w", list.Err)
	case a.options.format == asYAML:
		file, err := documentOf(list).YAML()
		if err == nil {
			_, err = a.out.Write(file)
		}
		return err
	case !a.isTable():
		return a.show(documentOf(list), nil)
	case list.Err != nil:
		a.note("rows that this version cannot read are not shown: %v", list.Err)
	}
	var tables []*table
	add := func(rows int, fill func(t *table)) {
		if rows > 0 {
			t := &table{}
			fill(t)
			tables = append(tables, t)
		}
	}
	add(len(list.Rules), func(t *table) {
		t.row("LIMIT", "PLAN", "RULE", "VERSION", "FROM")
		for _, r := range list.Rules {
			text := r.String()
			if !r.Until.IsZero() {
				text += ", until " + instant(r.Until)
			}
			t.row(r.Limit, dash(r.Plan), text, fmt.Sprint(r.Version), instantFrom(r.From, list.Now))
		}
	})
	add(len(list.Overrides), func(t *table) {
		t.row("OVERRIDE OF", "KEY", "HAS", "FROM", "AUTHOR", "REASON")
		for _, o := range list.Overrides {
			t.row(o.Limit, keyText(o.Key), o.String(), instantFrom(o.From, list.Now), o.Author, o.Reason)
		}
	})
	add(len(list.Pauses), func(t *table) {
		t.row("PAUSE OF", "KEY", "UNTIL", "AUTHOR", "REASON")
		for _, p := range list.Pauses {
			t.row(p.Limit, keyOrAll(p.Key), instantFrom(p.Until, list.Now), p.Author, p.Reason)
		}
	})
	add(len(list.Tiers.Tiers), func(t *table) {
		t.row("TIER (match " + string(list.Tiers.Match) + ")")
		for _, tier := range list.Tiers.Tiers {
			t.row(tier.String())
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

func (a *app) rulesList() *cobra.Command {
	cmd := a.command(cobra.Command{
		Use:   "list",
		Short: "Show all rules, overrides, pauses and tiers",
		Long: `Show all current and future rules, overrides, pauses and tiers. With -o yaml or -o json it prints the last
stored rules, overrides and tiers as a file for apply, for example to begin with rules in git. That file has
no pauses; see rules history --of pause.`,
		Args:    noArguments,
		Example: "  ratelimit rules list -o yaml > rules.yaml",
	}, func(ctx context.Context, _ []string) error {
		return a.withDatabase(ctx, func(ctx context.Context, db *database) error {
			list, err := db.store.List(ctx, rules.ListQuery{})
			if err != nil {
				return err
			}
			return a.showListing(&list)
		})
	})
	return a.withOutput(cmd, asYAML)
}

// documentOf returns a listing as a rules file: the rules and overrides that no later statement replaces or removes.
func documentOf(list *rules.Listing) *rules.Document {
	d := &rules.Document{}
	for _, s := range list.Rules {
		if s.Until.IsZero() {
			d.Rules = append(d.Rules, *s.Rule)
		}
	}
	if len(list.Tiers.Tiers) > 0 {
		d.Tiers = list.Tiers
	}
	for _, s := range list.Overrides {
		if s.Until.Equal(s.Override.Until) {
			d.Overrides = append(d.Overrides, *s.Override)
		}
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
			of, err := db.rulesOf(ctx, args[0])
			if err != nil {
				return err
			}
			return a.showListing(of)
		})
	}, "0 done", "6 the tables have nothing about the limit")
	return a.withOutput(cmd, asYAML)
}
