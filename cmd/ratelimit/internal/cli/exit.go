package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// The exit codes of all commands.
const (
	exitDone        = 0
	exitFailure     = 1
	exitUsage       = 2
	exitRefused     = 3
	exitDifference  = 4
	exitFault       = 5
	exitNotFound    = 6
	exitInterrupted = 130
)

type meaning struct {
	code int
	says string
}

// meanings returns what each exit code says, in their order.
func meanings() []meaning {
	return []meaning{
		{exitDone, "done; for check and take: allowed"},
		{exitFailure, "a failure, for example the database does not answer"},
		{exitUsage, "wrong usage, or no confirmation; nothing was done"},
		{exitRefused, "check, take: refused; nothing was taken"},
		{exitDifference, "rules diff: there is a difference; migrate status: a migration is missing"},
		{exitFault, "doctor: there is a problem; rules validate: the file is invalid"},
		{exitNotFound, "no such limit, rule, pause, reservation or lease; nothing was done"},
		{exitInterrupted, "interrupted"},
	}
}

func exitCodesText() string {
	var b strings.Builder
	b.WriteString("The exit codes of all commands:\n\n")
	for _, m := range meanings() {
		fmt.Fprintf(&b, "  %3d  %s\n", m.code, m.says)
	}
	b.WriteString("\nAnswers are on standard output, and errors on standard error.")
	return b.String()
}

// exit is an end of a command with a code of its own. Without an error the answer has been shown already.
type exit struct {
	code int
	err  error
}

func (e *exit) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *exit) Unwrap() error { return e.err }

// answer ends a command whose answer has been shown.
func answer(code int) error { return &exit{code: code} }

// misused returns the error for what cannot be asked so. Nothing has been done.
func misused(format string, args ...any) error {
	return &exit{exitUsage, fmt.Errorf(format, args...)}
}

// notFound returns the error for what does not exist. Nothing has been done.
func notFound(format string, args ...any) error {
	return &exit{exitNotFound, fmt.Errorf(format, args...)}
}

// codeOf returns the exit code for what a command returned.
func codeOf(ctx context.Context, err error) int {
	var e *exit
	switch {
	case err == nil:
		return exitDone
	case errors.As(err, &e):
		return e.code
	case ctx.Err() != nil:
		return exitInterrupted
	case isAny(err, rules.ErrNotFound, ratelimit.ErrNotReserved):
		return exitNotFound
	case isAny(err, rules.ErrInvalid, rules.ErrInvalidConfig, migrations.ErrInvalidSchema, migrations.ErrInvalidRole,
		inspect.ErrInvalid,
		ratelimit.ErrInvalidConfig, ratelimit.ErrInvalidLimit, ratelimit.ErrInvalidKey, ratelimit.ErrInvalidCost,
		ratelimit.ErrCostExceedsCapacity, ratelimit.ErrInvalidRequest):
		return exitUsage
	}
	return exitFailure
}

func isAny(err error, targets ...error) bool {
	return slices.ContainsFunc(targets, func(target error) bool { return errors.Is(err, target) })
}
