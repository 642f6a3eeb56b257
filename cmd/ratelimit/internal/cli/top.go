package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/internal/words"
	"github.com/pgratelimit/pgratelimit/observe/refusals"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// topFlags say what top looks for.
type topFlags struct {
	by, group, limit string
	since            spanFlag
	shadow           bool
	most             int
}

// check checks the values whose errors would otherwise not name the flags.
func (f *topFlags) check() error {
	isAllowed := f.by == "allowed"
	switch refusals.By(f.group) {
	case refusals.ByLimit, refusals.ByRoute, refusals.ByKey:
	default:
		return misused("--group is %.40q; use limit, route or key", f.group)
	}
	switch {
	case !isAllowed && f.by != "refusals":
		return misused("--by is %.40q; use refusals or allowed", f.by)
	case isAllowed && (f.group == string(refusals.ByRoute) || f.shadow):
		return misused("allowed requests are counted without routes and shadow; use --group limit or --group key")
	case time.Duration(f.since) > 1000*ratelimit.Day:
		return misused("--since is %s; use up to 1000d", words.Period(time.Duration(f.since)))
	}
	return checkMost(f.most)
}

func (a *app) topCommand() *cobra.Command {
	f := topFlags{since: spanFlag(lately)}
	cmd := a.command(cobra.Command{
		Use:   "top",
		Short: "Show the keys with the most refusals or requests",
		Long: `Show the limits, routes or keys with the most refusals or allowed requests, if your programs count them with
package refusals. It reads a bounded number of rows, and says if there are more.`,
		Args: noArguments,
		Example: `  ratelimit top --group key --since 15m
  ratelimit top --by allowed --group key`,
	}, func(ctx context.Context, _ []string) error {
		if err := f.check(); err != nil {
			return err
		}
		return a.withDatabase(ctx, func(ctx context.Context, db *database) error { return a.top(ctx, db, &f) })
	})
	flags := cmd.Flags()
	flags.StringVar(&f.by, "by", "refusals", "refusals, or allowed (which keys take most)")
	flags.StringVar(&f.group, "group", string(refusals.ByLimit), "limit, route or key")
	flags.StringVar(&f.limit, "limit", "", "only this limit")
	flags.Var(&f.since, "since", "age of the oldest refusals, up to 1000d")
	flags.BoolVar(&f.shadow, "shadow", false, "show the refusals of limits in shadow")
	flags.IntVarP(&f.most, "most", "n", 10, "maximum number of lines, up to 1000")
	return a.withOutput(cmd)
}

// top shows the sums that the flags ask for.
func (a *app) top(ctx context.Context, db *database, f *topFlags) error {
	now, err := db.reader.Now(ctx)
	if err != nil {
		return err
	}
	asked := now.Add(-time.Duration(f.since))
	sums, since, err := db.reader.TopRefused(ctx, refusals.TopConfig{
		Since: asked, By: refusals.By(f.group), Limit: f.limit, Shadow: f.shadow, Allowed: f.by == "allowed", Most: f.most,
	})
	if err != nil {
		return err
	}
	if since.After(asked) {
		a.note("there are too many counts; these are only since %s", instantFrom(since, now))
	}
	none := "nothing is counted as %s in the last " + words.Period(time.Duration(f.since)) +
		"; programs count with package refusals"
	if f.by == "allowed" {
		return showList(a, sums, fmt.Sprintf(none, "allowed"), []string{"LIMIT", "KEY", "ALLOWED"},
			func(s *refusals.Sum) []string { return []string{s.Limit, f.cell(s), fmt.Sprint(s.Allowed)} })
	}
	column := map[bool]string{true: "KEY", false: "ROUTE"}[f.group == string(refusals.ByKey)]
	return showList(a, sums, fmt.Sprintf(none, "refused"), []string{"LIMIT", column, "REFUSED", "COST", "LAST"},
		func(s *refusals.Sum) []string {
			return []string{s.Limit, f.cell(s), fmt.Sprint(s.Refused), number(s.Cost), instantFrom(s.Last, now)}
		})
}

// cell returns the key or the route of a sum, for people.
func (f *topFlags) cell(s *refusals.Sum) string {
	switch {
	case f.group != string(refusals.ByKey):
		return dash(s.Route)
	case s.Key == "":
		return "(shared, and keys not told apart)"
	}
	return keyText(s.Key)
}
