package cli

import (
	"context"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func (a *app) maintainCommand() *cobra.Command {
	var d definition
	every := spanFlag(10 * time.Minute)
	cmd := a.command(cobra.Command{
		Use:   "maintain [LIMIT ...]",
		Short: "Prune and expire at once and then every interval, until it is interrupted",
		Long: `Delete the rows of full buckets of the named limits, and end reservations that were not settled, at once and then every interval. It
follows the rules in the tables. For the policies of limits see ratelimit prune. Several of them can run at the same time. An
error is printed, and the next interval tries again. It ends when it is interrupted.`,
		Args:    cobra.ArbitraryArgs,
		Example: "  ratelimit maintain sendMessage freeTrials -f rules.yaml --every 10m --yes",
	}, func(ctx context.Context, args []string) error {
		if err := checkNames(ctx, &d, args); err != nil {
			return err
		}
		if err := a.confirm(ctx, "Delete the rows of full buckets, and end reservations that are due, until this ends?"); err != nil {
			return err
		}
		return a.withDatabaseWithin(ctx, 0, func(ctx context.Context, db *database) error {
			limits, err := a.limitsToPrune(ctx, db, &d, args)
			if err != nil {
				return err
			}
			set, err := a.loadRules(ctx, db, limits...)
			if err != nil {
				return err
			}
			limiter, err := ratelimit.New(db.pool, ratelimit.Config{Schema: db.schema, Policies: set, Observer: failures{a}})
			if err != nil {
				return err
			}
			ctx, stop := context.WithCancel(ctx)
			var running sync.WaitGroup
			defer running.Wait()
			defer stop()
			running.Go(func() { _ = set.Run(ctx) }) // its error is that of ctx
			return limiter.Maintain(ctx, time.Duration(every), limits...)
		})
	})
	cmd.Flags().Var(&every, "every", "interval, such as 10m")
	return a.withYes(a.withDefinitionFile(cmd, &d))
}

// failures prints the calls that fail.
type failures struct{ app *app }

// Observe prints a failure.
func (f failures) Observe(_ context.Context, event ratelimit.Event) {
	if failed, ok := event.(ratelimit.Failed); ok {
		f.app.note("%s: %v", failed.Verb, failed.Err)
	}
}
