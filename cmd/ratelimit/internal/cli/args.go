package cli

import (
	"strings"

	"github.com/spf13/cobra"
)

// limitAndKey checks that a LIMIT is named, and a KEY at most.
func limitAndKey(cmd *cobra.Command, args []string) error {
	switch {
	case len(args) == 0:
		return misused("no limit is named; write %s LIMIT [KEY]", cmd.CommandPath())
	case len(args) > 2:
		return misused("there are %d arguments; write %s LIMIT [KEY], with quotes around a key that has spaces", len(args),
			cmd.CommandPath())
	case len(args) == 2 && args[1] == "":
		return misused("the key is empty; leave it out for the bucket that everybody shares")
	}
	return nil
}

// limitAtMost checks that the arguments are at most one LIMIT.
func limitAtMost(cmd *cobra.Command, args []string) error {
	if len(args) > 1 {
		return misused("there are %d arguments; write %s [LIMIT]", len(args), cmd.CommandPath())
	}
	return nil
}

// oneArgument returns a check for exactly one argument.
func oneArgument(what string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != 1 {
			return misused("there are %d arguments; %s needs %s", len(args), cmd.CommandPath(), what)
		}
		return nil
	}
}

func noArguments(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return misused("%s takes no arguments, and there is %q; see %s --help", cmd.CommandPath(), strings.Join(args, " "),
			cmd.CommandPath())
	}
	return nil
}
