package cli

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

func (a *app) sqlCommand() *cobra.Command {
	return a.command(cobra.Command{
		Use:   "sql",
		Short: "Print a psql script with the calls for the limits of this database",
		Long: `Print a psql script that calls the SQL functions for each limit with a rule, in one transaction that it
rolls back, so you can run it and copy from it. docs/sql.md describes the functions.`,
		Args:    noArguments,
		Example: `  ratelimit sql | psql -v key=ada "$DATABASE_URL"`,
	}, func(ctx context.Context, _ []string) error {
		return a.withDatabase(ctx, func(ctx context.Context, db *database) error {
			list, err := db.store.List(ctx, rules.ListQuery{})
			if err != nil {
				return err
			}
			return a.showCalls(&list)
		})
	})
}

func (a *app) showCalls(list *rules.Listing) error {
	schema := pgx.Identifier{a.options.schema}.Sanitize()
	fmt.Fprintf(a.out, `-- Run it with a key: psql -v key=ada. Nothing stays: the script ends with ROLLBACK.
\if :{?key} \else \set key 'ada' \endif
BEGIN;
`)
	if len(list.Rules) == 0 {
		a.note("no limit has a rule; store one with ratelimit rules apply")
	}
	for _, r := range list.Rules {
		heading := r.Limit
		if r.Plan != "" {
			heading += ", plan " + r.Plan
		}
		fmt.Fprintf(a.out, "\n-- %s: %s\n", heading, r.String())
		if limit, err := r.Rule.AsLimit(); err != nil || limit.Spec().Shards > 1 {
			fmt.Fprintln(a.out, "-- It has shards, which only a program in Go decides on.")
			continue
		}
		limit, plan := "'"+r.Limit+"'", "" // names have no quotes
		if r.Plan != "" {
			plan = ", plan => '" + r.Plan + "'"
		}
		if _, holds := r.Rule.Policy.(ratelimit.Concurrency); holds {
			fmt.Fprintf(a.out, "SELECT * FROM %[1]s.acquire(%[2]s, :'key'%[3]s) \\gset lease_\n", schema, limit, plan)
			fmt.Fprintf(a.out, "SELECT %[1]s.renew_lease(%[2]s, :'key', :'lease_fence'%[3]s), %[1]s.release(%[2]s, :'key', "+
				":'lease_fence'%[3]s);\n", schema, limit, plan)
			continue
		}
		fmt.Fprintf(a.out, "SELECT * FROM %s.check(%s, :'key'%s);\n", schema, limit, plan)
		fmt.Fprintf(a.out, "SELECT * FROM %s.take(%s, :'key'%s);\n", schema, limit, plan)
	}
	_, err := fmt.Fprintln(a.out, "\nROLLBACK;")
	return err
}
