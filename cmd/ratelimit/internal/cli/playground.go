package cli

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/admin/playground"
)

func (a *app) playgroundCommand() *cobra.Command {
	return a.command(cobra.Command{
		Use:     "playground",
		Short:   "Print a page that shows what a limit does, for a browser",
		Long:    `Print a page that shows what a limit does, as one file for a browser or any web server. It uses no database.`,
		Args:    noArguments,
		Example: "  ratelimit playground > index.html",
	}, func(context.Context, []string) error { return playground.WriteHTML(a.out) })
}
