package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/pgratelimit/pgratelimit/migrations"
)

// app is one run of the program.
type app struct {
	in          io.Reader
	out, errOut io.Writer
	env         func(name string) string
	open        opener
	secrets     []string       // never shown
	cmd         *cobra.Command // the running command; nil: the arguments are not checked yet
	options     options
}

// options are the flags of all commands.
type options struct {
	databaseURL, schema string
	timeout             time.Duration
	hashKeyFile         string
	format              string
	yes                 bool
}

// Run runs the program with its arguments and returns its exit code. env returns the value of a variable, as os.Getenv.
func Run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer,
	env func(name string) string,
) int {
	return run(ctx, args, stdin, stdout, stderr, env, open)
}

func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer, env func(name string) string,
	open opener,
) int {
	out := &output{to: stdout}
	a := &app{in: stdin, out: out, errOut: stderr, env: env, open: open}
	root := a.root()
	root.SetArgs(append([]string{}, args...)) // nil would mean os.Args
	root.SetIn(stdin)
	root.SetOut(out)
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	var e *exit
	switch {
	case out.err != nil && (err == nil || a.cmd == nil || errors.As(err, &e) && e.err == nil): // not reported yet
		err = out.err
	case err != nil && a.cmd == nil && !errors.As(err, &e): // what cobra found wrong
		err = &exit{exitUsage, fmt.Errorf("%w; see %s --help", err, cmd.CommandPath())}
	}
	a.report(ctx, err)
	return codeOf(ctx, err)
}

// report says on standard error what went wrong.
func (a *app) report(ctx context.Context, err error) {
	var e *exit
	switch {
	case err == nil, errors.As(err, &e) && e.err == nil:
		return
	case ctx.Err() != nil:
		err = fmt.Errorf("interrupted: %w", err)
	}
	text := strings.TrimPrefix(a.scrub(err.Error()), "ratelimit: ")
	fmt.Fprintf(a.errOut, "ratelimit: %s\n", lines(text))
}

// note says something on standard error beside the answer.
func (a *app) note(format string, args ...any) {
	fmt.Fprintf(a.errOut, "note: %s\n", lines(a.scrub(fmt.Sprintf(format, args...))))
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "ratelimit",
		Short: "Manage the rate limits in a Postgres database",
		Long: `ratelimit manages the rate limits in a Postgres database: tables, rules, buckets, reservations, and the server.

The command uses the first of these that is set: --database-url, RATELIMIT_DATABASE_URL, DATABASE_URL, the variables of
libpq (PGHOST, PGDATABASE, PGSERVICE and others). No error prints the connection string.`,
		Version:           version(),
		SilenceUsage:      true,
		SilenceErrors:     true,
		DisableAutoGenTag: true,
	}
	flags := root.PersistentFlags()
	flags.StringVar(&a.options.databaseURL, "database-url", "", "connection string of the database; safer in "+
		"RATELIMIT_DATABASE_URL, because other users can see arguments")
	flags.StringVar(&a.options.schema, "schema", migrations.DefaultSchema, "schema of the tables")
	flags.DurationVar(&a.options.timeout, "timeout", defaultTimeout, "time limit for the database; 0: none")
	root.AddCommand(a.migrateCommands(), a.rulesCommands(), a.overrideCommands(), a.keyCommand(), a.getCommand(),
		a.checkCommand(), a.takeCommand(), a.resetCommand(),
		a.creditCommand(), a.unlockCommand(), a.pauseCommand(), a.resumeCommand(), a.topCommand(), a.reservationsCommands(),
		a.leasesCommands(), a.pruneCommand(), a.maintainCommand(),
		a.serveCommand(), a.simulateCommand(), a.doctorCommand(), a.playgroundCommand(), a.grantsCommand(), a.sqlCommand())
	root.AddCommand(topics()...)
	asGroup(root)
	return root
}

// version returns the version of this build.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "(unknown)"
	}
	return cmp.Or(info.Main.Version, "(devel)")
}

// topics are what help says besides the commands.
func topics() []*cobra.Command {
	return []*cobra.Command{
		{Use: "exit-codes", Short: "The exit codes of all commands", Long: exitCodesText()},
		{Use: "policies", Short: "How a command finds the policy of a limit", Long: policiesText},
		{Use: "environment", Short: "The environment variables", Long: environmentText},
	}
}

const environmentText = `The environment variables, which a flag overrides:

  RATELIMIT_DATABASE_URL  --database-url
  DATABASE_URL            --database-url, if RATELIMIT_DATABASE_URL is not set
  PGHOST, PGPORT, ..      the variables of libpq, if neither is set
  RATELIMIT_HASH_KEY      the secret of Config.HashKey; --hash-key-file names a file with it
  RATELIMIT_AUTHOR        --author; otherwise SUDO_USER, or USER unless that is root`

// asGroup makes a command that has others show them when none is named.
func asGroup(cmd *cobra.Command) {
	cmd.Args = cobra.ArbitraryArgs
	cmd.SuggestionsMinimumDistance = 2
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) == 0 && !cmd.HasParent():
			return cmd.Help()
		case len(args) == 0:
			return misused("name a command\n\n%s", cmd.UsageString())
		}
		hint := ""
		if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
			hint = fmt.Sprintf("; did you mean %s?", strings.Join(near, " or "))
		}
		return misused("there is no command %q of %s%s; see %s --help", args[0], cmd.CommandPath(), hint, cmd.CommandPath())
	}
}

// task is what a command does once its arguments are checked.
type task func(ctx context.Context, args []string) error

// command returns a command that runs do. exits are the exit codes that are its own.
func (a *app) command(cmd cobra.Command, do task, exits ...string) *cobra.Command {
	exits = append(exits, "1 failure", "2 wrong usage")
	if len(exits) == 2 {
		exits = append([]string{"0 done"}, exits...)
	}
	cmd.Long += "\n\nExit codes: " + strings.Join(exits, ", ") + "; see ratelimit help exit-codes."
	cmd.DisableFlagsInUseLine = true
	cmd.Use += " [flags]"
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		a.cmd = cmd
		if err := a.checkOptions(cmd); err != nil {
			return err
		}
		return do(cmd.Context(), args)
	}
	return &cmd
}

// isGiven reports whether the arguments have a flag.
func (a *app) isGiven(flag string) bool { return a.cmd.Flags().Changed(flag) }

// checkOptions checks the flags that several commands have.
func (a *app) checkOptions(cmd *cobra.Command) error {
	if a.options.timeout < 0 {
		return misused("the timeout is %v; use 0 for none", a.options.timeout)
	}
	return noEmptyFlags(cmd)
}

// noEmptyFlags checks that no flag is given without a value, as a script gives one whose variable is not set: it would
// be as if the flag were not there, and another schema or database meant.
func noEmptyFlags(cmd *cobra.Command) (err error) {
	cmd.Flags().Visit(func(flag *pflag.Flag) {
		// the rule without a plan; the bucket that everybody shares
		means := flag.Name == "plan" && cmd.Name() == "history" || flag.Name == "key"
		if flag.Value.Type() == "string" && flag.Value.String() == "" && !means && err == nil {
			err = misused("--%s is empty; give it a value, or leave it out", flag.Name)
		}
	})
	return err
}
