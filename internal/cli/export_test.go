package cli

import "github.com/spf13/cobra"

// Root returns the commands of the program, for tests that walk them.
func Root() *cobra.Command {
	root := (&app{env: func(string) string { return "" }}).root()
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	return root
}

// Shown is shown.
func Shown(s string) string { return shown(s) }
