package cli

import (
	"context"
	"crypto/rand"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/internal/words"
	"github.com/pgratelimit/pgratelimit/observe/refusals"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// prunedView is the result of prune in JSON and YAML.
type prunedView struct {
	Limits   []string `json:"limits"`
	Buckets  int64    `json:"buckets"`
	Refusals int64    `json:"refusals"`
}

func (a *app) pruneCommand() *cobra.Command {
	var d definition
	var older spanFlag
	cmd := a.command(cobra.Command{
		Use:   "prune [LIMIT ...]",
		Short: "Delete the rows of full buckets, and old counts of refusals",
		Long: `Delete the rows of the named limits' full buckets. That changes no decision, because a bucket without a row
is full. With --refusals-older-than it also deletes old counts of refusals.

A bucket must be full under each of its limit's policies: the current rules, those they replaced, and the definition
in --policy. If your code defines a limit with several policies, for example for plans, call Prune there instead,
because this command doesn't know them, and used tokens could come back. Without --timeout there is no time limit.`,
		Args: cobra.ArbitraryArgs,
		Example: `  ratelimit prune sendMessage freeTrials --yes
  ratelimit prune --refusals-older-than 30d --yes`,
	}, func(ctx context.Context, args []string) error {
		if len(args) == 0 && older == 0 {
			return misused("nothing is named to prune; name limits, or give --refusals-older-than")
		}
		if err := checkNames(&d, args); err != nil {
			return err
		}
		if err := a.confirm(ctx, "Delete %s?", pruned(args, time.Duration(older))); err != nil {
			return err
		}
		return a.withNoTimeout(ctx, func(ctx context.Context, db *database) error {
			v, err := a.prune(ctx, db, &d, args, time.Duration(older))
			if err != nil {
				return err
			}
			return a.showDone(v, func(t *table) {
				t.field("buckets deleted", fmt.Sprint(v.Buckets))
				t.field("counts deleted", fmt.Sprint(v.Refusals))
			})
		})
	})
	cmd.Flags().Var(&older, "refusals-older-than", "also delete older counts of refusals, such as 30d")
	return a.withYes(a.withOutput(a.withDefinition(cmd, &d)))
}

// checkNames returns an error if a name or the definition cannot be used, before any SQL.
func checkNames(d *definition, names []string) error {
	for _, name := range names {
		if err := d.check(name); err != nil {
			return err
		}
	}
	return nil
}

// pruned describes the rows that prune would delete.
func pruned(limits []string, older time.Duration) string {
	var parts []string
	if len(limits) > 0 {
		parts = append(parts, "the rows of full buckets of "+strings.Join(limits, ", "))
	}
	if older > 0 {
		parts = append(parts, "all counts of refusals that are older than "+words.Period(older))
	}
	return strings.Join(parts, ", and ")
}

func (a *app) prune(ctx context.Context, db *database, d *definition, args []string,
	older time.Duration,
) (v prunedView, err error) {
	v.Limits = append([]string{}, args...)
	limits, err := a.limitsToPrune(ctx, db, d, args)
	if err != nil {
		return v, err
	}
	if len(limits) > 0 {
		limiter, _, err := a.limiter(ctx, db, limits...)
		if err != nil {
			return v, err
		}
		if v.Buckets, err = limiter.Prune(ctx, limits...); err != nil {
			return v, err
		}
	}
	if older > 0 {
		v.Refusals, err = pruneRefusals(ctx, db, older)
	}
	return v, err
}

// limitsToPrune returns the limits of the names.
func (a *app) limitsToPrune(ctx context.Context, db *database, d *definition,
	names []string,
) (limits []ratelimit.Limit, err error) {
	d.noPlan = true // a row goes only when it is full under each of the rules
	for _, name := range names {
		// A random key, which has no override: one key's override must not count for the others.
		b, err := a.bucket(ctx, db, &bucketFlags{stored: true, definition: *d}, []string{name, rand.Text()})
		if err != nil {
			return nil, err
		}
		if b.why != nil {
			return nil, misused("%w", b.why)
		}
		limits = append(limits, b.request.Limit())
	}
	return limits, nil
}

func pruneRefusals(ctx context.Context, db *database, older time.Duration) (int64, error) {
	now, err := db.reader.Now(ctx)
	if err != nil {
		return 0, err
	}
	counter, err := refusals.New(db.pool, refusals.Config{Schema: db.schema})
	if err != nil {
		return 0, err
	}
	return counter.Prune(ctx, now.Add(-older))
}
