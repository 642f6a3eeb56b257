package rules

import (
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

var (
	// ErrInvalid is returned by the methods of a Store, before any change, if a change is invalid. The message says what to
	// write instead.
	ErrInvalid = errors.New("rules: invalid")

	// ErrNotFound is returned by Delete, RemoveOverride and Resume when there is nothing to take away. Nothing was changed.
	ErrNotFound = errors.New("rules: not found")

	// ErrInvalidConfig is returned by NewStore, NewSet and NewSite when an argument or a field of the configuration cannot
	// be used, and by calls on a Store, a Set or a Site that these did not make, or on a Store that WithTx bound to nil.
	ErrInvalidConfig = errors.New("rules: invalid configuration")
)

// SQLSTATE values of a schema that lacks the tables, and of a role that may not use them.
const (
	codeUndefinedTable        = "42P01"
	codeUndefinedColumn       = "42703"
	codeInsufficientPrivilege = "42501"
)

// explain adds to err what to do about it where the server's words do not say.
func explain(err error, schema string) error {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		return err
	}
	switch pgErr.Code {
	case codeUndefinedTable, codeUndefinedColumn:
		return fmt.Errorf("%w (schema %q): %w", ratelimit.ErrNotMigrated, schema, err)
	case codeInsufficientPrivilege:
		return fmt.Errorf("%w; on schema %q, who loads rules needs the privileges of an Application, and who changes them those of an Operator: "+
			"migrations.Grants has the statements", err, schema)
	}
	return err
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %w", ErrInvalid, fmt.Errorf(format, args...))
}
