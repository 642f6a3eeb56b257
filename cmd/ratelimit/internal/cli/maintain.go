package cli

import (
	"context"
	"errors"
	"fmt"
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
		Short: "Prune and expire at regular intervals, until interrupted",
		Long: `Delete the rows of the named limits' full buckets, and end reservations that are due, now and after each
interval, until interrupted. It prints how many, and continues after an error. Several processes can run it
at the same time.`,
		Args:    cobra.ArbitraryArgs,
		Example: "  ratelimit maintain sendMessage freeTrials --every 10m --yes",
	}, func(ctx context.Context, args []string) error {
		if err := checkNames(&d, args); err != nil {
			return err
		}
		if err := a.confirm(ctx,
			"Delete the rows of full buckets, and end reservations that are due, until this ends?"); err != nil {
			return err
		}
		return a.withDatabaseWithin(ctx, 0, func(ctx context.Context, db *database) error {
			limits, err := a.limitsToPrune(ctx, db, &d, args)
			if err != nil {
				return err
			}
			limiter, set, err := a.limiter(ctx, db, limits...)
			if err != nil {
				return err
			}
			ctx, stop := context.WithCancel(ctx)
			var running sync.WaitGroup
			defer running.Wait()
			defer stop()
			running.Go(func() { _ = set.Run(ctx) }) // its Config is valid
			return a.maintain(ctx, limiter, time.Duration(every), limits)
		})
	})
	cmd.Flags().Var(&every, "every", "interval, such as 10m")
	return a.withYes(a.withDefinition(cmd, &d))
}

// maintain does the work of Limiter.Maintain, and prints a line for each interval.
func (a *app) maintain(ctx context.Context, limiter *ratelimit.Limiter, every time.Duration,
	limits []ratelimit.Limit,
) error {
	for {
		ended, failed := limiter.Expire(ctx)
		deleted, err := int64(0), error(nil)
		if len(limits) > 0 {
			deleted, err = limiter.Prune(ctx, limits...)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err := errors.Join(failed, err); err != nil {
			a.note("%v", a.explain(err))
		}
		if _, err := fmt.Fprintf(a.out, "%s: %s deleted, %s ended\n", instant(time.Now()), count(deleted, "row"),
			count(ended, "reservation")); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(every + ratelimit.Jitter(every/10)):
		}
	}
}
