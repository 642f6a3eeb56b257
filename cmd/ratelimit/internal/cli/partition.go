package cli

import (
	"context"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/migrations"
)

// partitionedView is what a change of the partitions has done, for programs.
type partitionedView struct {
	Schema     string `json:"schema"`
	Partitions int    `json:"partitions"`
	Was        int    `json:"was"`
}

func (v *partitionedView) words() string {
	if v.Partitions == v.Was {
		return fmt.Sprintf("nothing to do: the buckets of schema %s are in %s", v.Schema, inPartitions(v.Partitions))
	}
	return fmt.Sprintf("done: the buckets of schema %s are in %s, and were in %s", v.Schema, inPartitions(v.Partitions), inPartitions(v.Was))
}

func inPartitions(n int) string {
	if n == 1 {
		return "one table"
	}
	return fmt.Sprintf("%d partitions", n)
}

func (a *app) migratePartition() *cobra.Command {
	return a.withYes(a.withOutput(a.command(cobra.Command{
		Use:   "partition NUMBER",
		Short: "Change the number of partitions of the buckets",
		Long: `Copy the table of buckets into a number of partitions, by hash; 1 is one plain table. With partitions each call costs more:
docs/operations.md says when they pay.

It copies the rows in one transaction, which locks the table. Calls wait meanwhile, for some seconds for each million rows,
or fail after their timeout. The disk must have room for a second copy of the table. It waits up to three seconds for
transactions that use the table, and otherwise changes nothing.`,
		Args:    cobra.ExactArgs(1),
		Example: "  ratelimit migrate partition 16 --yes",
	}, func(ctx context.Context, args []string) error {
		n, err := strconv.Atoi(args[0])
		if err != nil || n < 1 || n > migrations.MaxPartitions {
			return misused("%q is no number of partitions; use 1, which is one plain table, to %d", args[0], migrations.MaxPartitions)
		}
		if err := a.confirm(ctx, "Lock the table of buckets of schema %s, and copy it into %s?", a.options.schema, inPartitions(n)); err != nil {
			return err
		}
		return a.withNoTimeout(ctx, func(ctx context.Context, db *database) error {
			config := migrations.Config{Schema: db.schema, Partitions: n}
			was, err := migrations.Partitions(ctx, db.pool, config)
			if err != nil {
				return err
			}
			if err := migrations.Partition(ctx, db.pool, config); err != nil {
				return err
			}
			v := partitionedView{db.schema, n, was}
			return a.showDone(v, func(t *table) { t.row(v.words()) })
		})
	})))
}
