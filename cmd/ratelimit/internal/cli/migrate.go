package cli

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/migrations"
)

func (a *app) migrateCommands() *cobra.Command {
	migrate := &cobra.Command{Use: "migrate", Short: "Create the tables, remove them, or show their version"}
	migrate.AddCommand(a.migrateUp(), a.migrateDown(), a.migrateStatus(), a.migratePrint())
	asGroup(migrate)
	return migrate
}

// withNoTimeout runs fn on the database without a bound, unless --timeout is given.
func (a *app) withNoTimeout(ctx context.Context, fn func(ctx context.Context, db *database) error) error {
	if a.isGiven("timeout") {
		return a.withDatabase(ctx, fn)
	}
	return a.withDatabaseWithin(ctx, 0, fn)
}

// migratedView is what a migration has done, for programs.
type migratedView struct {
	Schema   string   `json:"schema"`
	Version  int64    `json:"version"`
	Was      int64    `json:"was"`
	Restored []string `json:"restored"` // the functions that the schema had lost
}

func (v *migratedView) words() string {
	switch {
	case len(v.Restored) > 0:
		return fmt.Sprintf("restored: schema %s at version %d had lost %s; grant the privileges again, as ratelimit grants "+
			"prints them",
			v.Schema, v.Version, strings.Join(v.Restored, ", "))
	case v.Version != 0 && v.Version == v.Was:
		return fmt.Sprintf("nothing to apply: schema %s is at version %d", v.Schema, v.Version)
	case v.Version != 0:
		return fmt.Sprintf("applied: schema %s is at version %d, and was at %d", v.Schema, v.Version, v.Was)
	case v.Was == 0:
		return fmt.Sprintf("nothing to remove: schema %s has no tables of limits", v.Schema)
	}
	return fmt.Sprintf("removed: schema %s has no tables of limits, and was at version %d", v.Schema, v.Was)
}

// migrate runs move, and shows from which version to which it went.
func (a *app) migrate(ctx context.Context, db *database,
	move func(context.Context, *pgxpool.Pool, migrations.Config) error,
) error {
	config := migrations.Config{Schema: db.schema}
	before, err := migrations.Version(ctx, db.pool, config)
	if err != nil {
		return err
	}
	if err := a.notePooler(ctx, db); err != nil {
		return err
	}
	lost, err := migrations.MissingFunctions(ctx, db.pool, config)
	if err != nil {
		return err
	}
	if err := move(ctx, db.pool, config); err != nil {
		return err
	}
	after, err := migrations.Version(ctx, db.pool, config)
	if err != nil {
		return err
	}
	v := migratedView{Schema: db.schema, Version: after, Was: before, Restored: []string{}}
	for i := 0; i < len(lost) && after != 0 && after == before; i++ {
		v.Restored = append(v.Restored, lost[i].Name)
	}
	return a.showDone(v, func(t *table) { t.row(v.words()) })
}

// notePooler says that the lock of a migration needs a session of its own, where something stands between this program
// and the server.
func (a *app) notePooler(ctx context.Context, db *database) error {
	return db.pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
		var pid uint32
		err := conn.QueryRow(ctx, "SELECT pg_catalog.pg_backend_pid()::bigint").Scan(&pid)
		if err == nil && pid != conn.Conn().PgConn().PID() {
			a.note("the server is reached through a pooler; in transaction mode the lock of a migration may stay with a " +
				"connection of it, so that the next one waits: migrate on a connection to the server itself")
		}
		return err
	})
}

func (a *app) migrateUp() *cobra.Command {
	return a.withOutput(a.command(cobra.Command{
		Use:   "up",
		Short: "Apply the missing migrations",
		Long: `Apply the missing migrations, each in its own transaction. Run it before you start programs with a newer
version, any number of times, and even while programs run. The role that runs it owns the tables. Connect to
the server itself, or through a pooler in session mode. Without --timeout there is no time limit.`,
		Args:    noArguments,
		Example: "  ratelimit migrate up",
	}, func(ctx context.Context, _ []string) error {
		return a.withNoTimeout(ctx,
			func(ctx context.Context, db *database) error { return a.migrate(ctx, db, migrations.Up) })
	}))
}

func (a *app) migrateDown() *cobra.Command {
	return a.withYes(a.withOutput(a.command(cobra.Command{
		Use:   "down",
		Short: "Remove the tables with all data",
		Long: `Remove the tables with all data: buckets, reservations, rules and their history. Your programs' calls fail
until you run up again, and then every bucket is full.`,
		Args:    noArguments,
		Example: "  ratelimit migrate down --schema trial --yes",
	}, func(ctx context.Context, _ []string) error {
		if err := a.confirm(ctx, "Remove all limits, reservations, rules and their history from schema %s?",
			a.options.schema); err != nil {
			return err
		}
		return a.withNoTimeout(ctx,
			func(ctx context.Context, db *database) error { return a.migrate(ctx, db, migrations.Down) })
	})))
}

func (a *app) migratePrint() *cobra.Command {
	return a.command(cobra.Command{
		Use:   "print",
		Short: "Print the SQL that up sends to an empty database",
		Long: `Print the SQL of all migrations in order, for another migration tool. It uses no database. The SQL records
its versions for migrate status and doctor. After you update ratelimit, print it again and apply the new
migrations.`,
		Args: noArguments,
		Example: `  ratelimit migrate print > migrations/0042_ratelimit.sql
  ratelimit migrate print --schema limits | psql --single-transaction`,
	}, func(context.Context, []string) error {
		statements, err := migrations.SQL(migrations.Config{Schema: a.options.schema})
		if err != nil {
			return err
		}
		_, err = io.WriteString(a.out, statements)
		return err
	})
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
		Short:   "Show the applied migrations",
		Long:    "Show the applied and the missing migrations. It only reads.",
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
	}, "0 all are applied", "4 some are missing"))
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
