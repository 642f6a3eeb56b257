package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/cmd/ratelimit/internal/doctor"
)

func (a *app) doctorCommand() *cobra.Command {
	var config doctor.Config
	var oldest spanFlag
	var all bool
	cmd := a.command(cobra.Command{
		Use:   "doctor",
		Short: "Find problems in the database and the server, and say how to fix them",
		Long: `Find problems in the database and the server, and say how to fix each. It only reads. Connect as your
programs do, through the same pooler, because it also checks the connection. --all also prints the checks
that found nothing.`,
		Args:    noArguments,
		Example: "  ratelimit doctor --role app",
	}, func(ctx context.Context, _ []string) (err error) {
		config.Schema, config.MaxTransaction = a.options.schema, time.Duration(oldest)
		if config.HashKey, err = a.hashKey(); err != nil {
			return err
		}
		return a.examine(ctx, config, all)
	}, "0 no problem", "5 there is a problem")
	cmd.Flags().StringVar(&config.Role, "role", "", "role of the programs, whose privileges are checked (default: the "+
		"connected role)")
	cmd.Flags().Var(&oldest, "max-transaction", "maximum age of a transaction (default 5m)")
	cmd.Flags().BoolVarP(&all, "all", "a", false, "also print the checks without a problem")
	a.withHashKey(cmd)
	return a.withOutput(cmd)
}

func (a *app) examine(ctx context.Context, config doctor.Config, all bool) error {
	connection, _, err := a.databaseConfig()
	if err != nil {
		return err
	}
	var report doctor.Report
	err = within(ctx, a.options.timeout, func(ctx context.Context) (err error) {
		report, err = doctor.Run(ctx, connection.ConnConfig, config)
		return err
	})
	if errors.Is(err, doctor.ErrInvalidConfig) {
		return misused("%w", err)
	}
	if err != nil {
		return err
	}
	for i := range report.Findings {
		report.Findings[i].Says, report.Findings[i].Do = a.scrub(report.Findings[i].Says), a.scrub(report.Findings[i].Do)
	}
	if !a.isTable() {
		err = a.show(report, nil)
	} else {
		err = a.showFindings(report, all)
	}
	if err == nil && isWrong(report.Worst()) {
		return answer(exitFault)
	}
	return err
}

// isWrong reports whether something has to be done about a finding.
func isWrong(level doctor.Level) bool { return level == doctor.Warning || level == doctor.Fault }

// showFindings prints the findings as text: the problems, or all.
func (a *app) showFindings(report doctor.Report, all bool) error {
	if !all && !isWrong(report.Worst()) {
		_, err := fmt.Fprintf(a.out, "all is well; --all shows the answers of the checks: %s\n",
			strings.Join(doctor.Checks(), ", "))
		return err
	}
	for _, f := range report.Findings {
		if !all && !isWrong(f.Level) {
			continue
		}
		if _, err := fmt.Fprintf(a.out, "%-8s%s: %s\n", f.Level, f.Check, lines(f.Says)); err != nil {
			return err
		}
		if f.Do != "" {
			fmt.Fprintf(a.out, "        %s\n", strings.ReplaceAll(lines(f.Do), "\n", "\n        "))
		}
	}
	return nil
}
