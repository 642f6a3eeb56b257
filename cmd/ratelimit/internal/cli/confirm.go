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

// mayAsk returns an error if the input is no terminal and --yes is not given. Commands call it before any change.
func (a *app) mayAsk() error {
	if a.options.yes || a.isTerminal() {
		return nil
	}
	return misused("the command needs a confirmation, and standard input is not a terminal; check what it would do, and give --yes")
}

func (a *app) isTerminal() bool {
	file, ok := a.in.(interface{ Fd() uintptr })
	return ok && term.IsTerminal(int(file.Fd()))
}

// confirm asks, unless --yes is given, and returns an error unless the answer is yes.
func (a *app) confirm(ctx context.Context, format string, args ...any) error {
	if err := a.mayAsk(); err != nil || a.options.yes {
		return err
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
