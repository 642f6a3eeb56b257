package cli

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// soon is the longest delay between a change and its start that the output leaves out. It is longer than the Lead of a
// Store.
const soon = time.Minute

// changeOf returns a statement for people, with the one that it replaced.
func changeOf(s *rules.Statement) string {
	text := s.String()
	if s.Old != nil {
		text = s.Old.String() + " -> " + text
	}
	if s.From.After(s.Made.Add(soon)) {
		text += ", from " + instant(s.From)
	}
	return text
}

func (a *app) rulesHistory() *cobra.Command {
	var query rules.HistoryQuery
	var plan, key string
	cmd := a.command(cobra.Command{
		Use:   "history [LIMIT]",
		Short: "Show the changes of rules, with author, time and reason",
		Long: "Show the changes of rules, overrides, pauses and tiers, with author, time and reason. The newest change " +
			"comes first.",
		Args: limitAtMost,
		Example: `  ratelimit rules history sendMessage --of rule
  ratelimit rules history --most 20 -o json`,
	}, func(ctx context.Context, args []string) error {
		if len(args) > 0 {
			if _, err := ratelimit.NewLimit(args[0], ratelimit.PerSecond(1)); err != nil {
				return err
			}
			query.Limit = args[0]
		}
		if !slices.Contains([]string{"", rules.OfRule, rules.OfOverride, rules.OfPause, rules.OfTiers}, query.Of) {
			return misused("--of is %.40q; use rule, override, pause or tiers", query.Of)
		}
		if query.Most < 1 || query.Most > 10_000 {
			return misused("--most is %d; use 1 to 10000", query.Most)
		}
		if a.isGiven("plan") {
			query.Plan = &plan
		}
		if a.isGiven("key") {
			query.Key = &key
		}
		return a.withDatabase(ctx, func(ctx context.Context, db *database) error {
			statements, err := db.store.History(ctx, query)
			if err == nil && len(statements) == 0 && query.Limit != "" {
				_, err = db.rulesOf(ctx, query.Limit)
			}
			if err != nil {
				return err
			}
			head := []string{"VERSION", "MADE", "AUTHOR", "REASON", "OF", "CHANGE"}
			return showList(a, statements, "there are no changes", head, func(s *rules.Statement) []string {
				return []string{
					fmt.Sprint(s.Version), instant(s.Made), s.Author, s.Reason, nameOf(s.Of, s.Limit, s.Plan, s.Key),
					changeOf(s),
				}
			})
		})
	}, "0 done", "6 the tables have nothing about the limit")
	flags := cmd.Flags()
	flags.StringVar(&query.Of, "of", "", "only changes of one of rule, override, pause and tiers")
	flags.StringVar(&plan, "plan", "", "only rules for the plan; empty: rules without a plan")
	flags.StringVar(&key, "key", "", "only overrides and pauses of the key, in its stored form")
	flags.Int64Var(&query.Before, "before", 0, "only changes before this version")
	flags.IntVarP(&query.Most, "most", "n", 50, "maximum number of changes")
	return a.withOutput(cmd)
}
