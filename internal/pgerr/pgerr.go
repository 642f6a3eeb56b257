// Package pgerr names the SQLSTATEs of errors that Postgres returns, and explains the errors of a schema that is not
// ready.
package pgerr

import (
	"errors"
	"fmt"
	"regexp"

	"github.com/jackc/pgx/v5/pgconn"
)

// SQLSTATEs that packages test for.
const (
	UndefinedTable        = "42P01"
	UndefinedColumn       = "42703"
	UndefinedFunction     = "42883"
	InvalidSchemaName     = "3F000"
	InsufficientPrivilege = "42501"
	ReadOnly              = "25006"
	QueryCanceled         = "57014"
	InFailedTransaction   = "25P02"
)

// ErrNotMigrated is ratelimit.ErrNotMigrated.
var ErrNotMigrated = errors.New("ratelimit: a table, a column or a function is missing; run migrations.Up")

// Code returns the SQLSTATE of err, or "" if err is not an error that a server returned.
func Code(err error) string {
	if err == nil { // errors.As allocates
		return ""
	}
	var server *pgconn.PgError
	if !errors.As(err, &server) {
		return ""
	}
	return server.Code
}

// numbered matches what a server in any language says of a missing function of package migrations: its schema, and its
// name, which ends in a number. An operator, or a function that a trigger of the application calls, has no such name.
var numbered = regexp.MustCompile(`\b[a-z0-9_]+\.[a-z_]+_[0-9]+\(`)

// IsMissing reports whether err says that a table, a column, a function of package migrations or the schema is missing.
func IsMissing(err error) bool {
	switch Code(err) {
	case UndefinedTable, UndefinedColumn, InvalidSchemaName:
		return true
	case UndefinedFunction:
		var server *pgconn.PgError
		return errors.As(err, &server) && numbered.MatchString(server.Message)
	}
	return false
}

// Explain adds the remedy to err: ErrNotMigrated if something is missing in the schema, the privileges that the role
// needs if it lacks one, and what to do in a failed transaction. privileges ends a sentence that begins with "the role
// needs".
func Explain(err error, schema, privileges string) error {
	switch {
	case IsMissing(err):
		return fmt.Errorf("%w (schema %q): %w", ErrNotMigrated, schema, err)
	case Code(err) == InFailedTransaction:
		return fmt.Errorf("%w; an earlier statement of the transaction failed: return its error, and roll back", err)
	case Code(err) == InsufficientPrivilege:
		return fmt.Errorf("%w; on schema %q the role needs %s: migrations.Grants has the statements", err, schema, privileges)
	}
	return err
}
