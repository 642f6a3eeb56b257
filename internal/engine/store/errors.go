package store

import (
	"errors"
	"regexp"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/internal/pgerr"
)

// ErrContended is returned by a call that has waited for too many rows, or met too many conflicts.
var ErrContended = errors.New("ratelimit: too much contention")

// SQLSTATE values that decide something here.
const (
	codeSerializationFailure = "40001"
	codeDeadlockDetected     = "40P01"
	codeLockNotAvailable     = "55P03"
	codeUniqueViolation      = "23505" // another call inserted a row first: see spend_1
)

// IsRetryable reports whether a transaction lost against a concurrent one.
func IsRetryable(err error) bool {
	code := pgerr.Code(err)
	return code == codeSerializationFailure || code == codeDeadlockDetected
}

// IsLockTimeout reports whether a statement waited for a row as long as lock_timeout allows.
func IsLockTimeout(err error) bool { return pgerr.Code(err) == codeLockNotAvailable }

// HasTimedOut reports whether a timeout of the session has ended a statement, or an operator has cancelled it.
func HasTimedOut(err error) bool { return IsLockTimeout(err) || pgerr.Code(err) == pgerr.QueryCanceled }

// ofAll matches the SQLSTATEs that every call of a batch would get. They mean a broken connection, a missing migration,
// or a server that is read-only, shutting down, or out of memory or connections. A full disk (53100) fails only calls
// that need a new page.
var ofAll = regexp.MustCompile(`^(08|57P|25006|26000|3F000|42P01|42P05|42703|42883|53200|53300)`)

// isOfOne reports whether a statement for several calls may have failed because of one of them, for example by a value
// or a row of it, or because they are too many for statement_timeout. Nothing was done then.
func isOfOne(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.SeverityUnlocalized == "ERROR" && !ofAll.MatchString(pgErr.Code)
}
