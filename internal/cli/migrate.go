package cli

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/migrations"
)

func (a *app) migrateCommands() *cobra.Command {
	migrate := &cobra.Command{Use: "migrate", Short: "Make the tables, remove them, or say which there are"}
	migrate.AddCommand(a.migrateUp(), a.migrateDown(), a.migrateStatus())
	asGroup(migrate)
	return migrate
}

// withNoTimeout runs fn on the database without a bound, unless --timeout is given.
func (a *app) withNoTimeout(ctx context.Context, cmd *cobra.Command, fn func(ctx context.Context, db *database) error) error {
	timeout := time.Duration(0)
	if cmd.Flags().Changed("timeout") {
		timeout = a.options.timeout
	}
	return a.withDatabaseWithin(ctx, timeout, fn)
}

func (a *app) migrateUp() *cobra.Command {
	var cmd *cobra.Command
	cmd = a.command(cobra.Command{
		Use:   "up",
		Short: "Apply the migrations that are missing",
		Long: `Apply the migrations that are missing, each in a transaction of its own. Do it before programs of a newer version start.
The tables belong to the role that does it. It may be done at any time, several times, and while programs run. Without
--timeout it takes as long as it takes.`,
		Args:    noArguments,
		Example: "  ratelimit migrate up",
	}, func(ctx context.Context, _ []string) error {
		return a.withNoTimeout(ctx, cmd, func(ctx context.Context, db *database) error {
			config := migrations.Config{Schema: db.schema}
			before, err := migrations.Version(ctx, db.pool, config)
			if err != nil {
				return err
			}
			if err := migrations.Up(ctx, db.pool, config); err != nil {
				return err
			}
			after, err := migrations.Version(ctx, db.pool, config)
			if err != nil {
				return err
			}
			if after == before {
				_, err = fmt.Fprintf(a.out, "nothing to apply: schema %s is at version %d\n", db.schema, after)
				return err
			}
			_, err = fmt.Fprintf(a.out, "applied: schema %s is at version %d, and was at %d\n", db.schema, after, before)
			return err
		})
	})
	return cmd
}

func (a *app) migrateDown() *cobra.Command {
	var cmd *cobra.Command
	cmd = a.withYes(a.command(cobra.Command{
		Use:   "down",
		Short: "Remove the tables and all that is in them",
		Long: `Remove the tables and all that is in them: every bucket, reservation and rule, and the history of the rules. Every limit
is full again after the next up. Programs that run fail until then.`,
		Args:    noArguments,
		Example: "  ratelimit migrate down --schema trial --yes",
	}, func(ctx context.Context, _ []string) error {
		if err := a.confirm(ctx, "Remove all limits, reservations, rules and their history from schema %s?", a.options.schema); err != nil {
			return err
		}
		return a.withNoTimeout(ctx, cmd, func(ctx context.Context, db *database) error {
			if err := migrations.Down(ctx, db.pool, migrations.Config{Schema: db.schema}); err != nil {
				return err
			}
			_, err := fmt.Fprintf(a.out, "removed: schema %s has no tables of limits\n", db.schema)
			return err
		})
	}))
	return cmd
}

// migrationView is how far a schema is.
type migrationView struct {
	Schema  string   `json:"schema"`
	Version int64    `json:"version"`
	Newest  int64    `json:"newest"`
	Missing []string `json:"missing"`
}

func (a *app) migrateStatus() *cobra.Command {
	return a.withOutput(a.command(cobra.Command{
		Use:     "status",
		Short:   "Say which migrations are applied",
		Long:    "Say which migrations are applied, and which are missing. It only reads.",
		Args:    noArguments,
		Example: "  ratelimit migrate status -o json",
	}, func(ctx context.Context, _ []string) error {
		return a.withDatabase(ctx, func(ctx context.Context, db *database) error {
			version, err := migrations.Version(ctx, db.pool, migrations.Config{Schema: db.schema})
			if err != nil {
				return err
			}
			v := migrationView{Schema: db.schema, Version: version, Missing: []string{}}
			files, err := migrations.FS.ReadDir(".")
			if err != nil {
				return err
			}
			for _, file := range files {
				number, _, _ := strings.Cut(file.Name(), "_")
				n, err := strconv.ParseInt(number, 10, 64)
				if err != nil {
					continue
				}
				v.Newest = max(v.Newest, n)
				if n > version {
					v.Missing = append(v.Missing, file.Name())
				}
			}
			if err := a.show(v, v.fill); err != nil {
				return err
			}
			if len(v.Missing) > 0 {
				return answer(exitDifference)
			}
			return nil
		})
	}, "0 all is applied", "4 some are missing"))
}

func (v *migrationView) fill(t *table) {
	t.field("schema", v.Schema)
	t.field("version", fmt.Sprintf("%d of %d", v.Version, v.Newest))
	switch {
	case len(v.Missing) > 0:
		t.field("missing", strings.Join(v.Missing, ", "))
		t.field("to do", "ratelimit migrate up")
	case v.Version > v.Newest:
		t.field("to do", "use a newer ratelimit: these tables are of a later version")
	}
}
