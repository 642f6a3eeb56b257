package cli

import (
	"bufio"
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"
)

// withYes gives a command that destroys something the flag --yes.
func (a *app) withYes(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().BoolVarP(&a.options.yes, "yes", "y", false, "do not ask for confirmation")
	return cmd
}

func (a *app) isTerminal() bool {
	file, ok := a.in.(interface{ Fd() uintptr })
	return ok && term.IsTerminal(int(file.Fd()))
}

// confirm asks, unless --yes is given, and returns an error unless the answer is yes. Commands call it before any
// change, and after they have shown it.
func (a *app) confirm(ctx context.Context, format string, args ...any) error {
	switch {
	case a.options.yes:
		return nil
	case !a.isTerminal():
		return misused("the command needs a confirmation, and standard input is not a terminal; check what it would do, " +
			"and give --yes")
	}
	fmt.Fprintf(a.errOut, "%s [y/N] ", shown(fmt.Sprintf(format, args...)))
	said := make(chan string, 1)
	go func() { // without an answer, it ends with the process
		line, _ := bufio.NewReader(a.in).ReadString('\n')
		said <- line
	}()
	select {
	case line := <-said:
		if yes := strings.ToLower(strings.TrimSpace(line)); yes != "y" && yes != "yes" {
			return misused("not confirmed; nothing was done")
		}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
