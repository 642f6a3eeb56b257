package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/migrations"
)

func (a *app) grantsCommand() *cobra.Command {
	var roles migrations.Roles
	cmd := a.command(cobra.Command{
		Use:   "grants",
		Short: "Print the statements that give each role its privileges",
		Long: `Print the statements that give each role only the privileges it needs. The roles must exist. It uses no
database, so pipe the output to psql as the tables' owner.`,
		Args:    noArguments,
		Example: "  ratelimit grants --application app --operator support --reader status_page | psql",
	}, func(context.Context, []string) error {
		if roles == (migrations.Roles{RowSecurity: roles.RowSecurity}) {
			return misused("no role is named; give --application, --operator, --reader, --caller, --client or --owner")
		}
		statements, err := migrations.Grants(migrations.Config{Schema: a.options.schema}, roles)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(a.out, strings.TrimRight(statements, "\n"))
		return err
	})
	flags := cmd.Flags()
	flags.StringVar(&roles.Application, "application", "", "role of programs that take; they cannot change rules")
	flags.StringVar(&roles.Operator, "operator", "", "role of people who change rules, and who reset, credit and charge")
	flags.StringVar(&roles.Reader, "reader", "", "role of pages and monitoring, which only reads")
	flags.StringVar(&roles.Caller, "caller", "", "role of programs in other languages: it calls the functions for "+
		"people, and sees no table")
	flags.StringVar(&roles.Client, "client", "", "role of clients that run their own SQL: it may only call take_own")
	flags.StringVar(&roles.Owner, "owner", "", "role that migrates; it becomes the owner of the tables")
	flags.BoolVar(&roles.RowSecurity, "row-security", false, "also print the policies that the roles need under row "+
		"level security")
	return cmd
}
