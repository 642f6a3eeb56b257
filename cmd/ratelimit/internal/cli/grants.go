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
		Long: `Print the statements that give each role only the privileges it needs. It uses no database: pipe it to psql, as the
owner of the tables. The roles have to be there.`,
		Args:    noArguments,
		Example: "  ratelimit grants --application app --operator support --reader status_page | psql",
	}, func(context.Context, []string) error {
		if roles == (migrations.Roles{}) {
			return misused("no role is named; give --application, --operator, --reader or --owner")
		}
		statements, err := migrations.Grants(migrations.Config{Schema: a.options.schema}, roles)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(a.out, strings.TrimRight(statements, "\n"))
		return err
	})
	flags := cmd.Flags()
	flags.StringVar(&roles.Application, "application", "", "role of programs that take: they change no rule")
	flags.StringVar(&roles.Operator, "operator", "", "role of people who change rules, and who reset, credit and charge")
	flags.StringVar(&roles.Reader, "reader", "", "role of pages and monitoring: it writes nothing")
	flags.StringVar(&roles.Owner, "owner", "", "role that migrates, when the tables are to become its own")
	return cmd
}
