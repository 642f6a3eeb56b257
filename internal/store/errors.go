package store

import (
	"errors"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

var (
	// ErrContended is what a call gets that has waited for too many rows, or met too many conflicts.
	ErrContended = errors.New("ratelimit: too much contention")
	// ErrNotReserved is what asks for a reservation that is not there.
	ErrNotReserved = errors.New("ratelimit: no such reservation")
)

// SQLSTATE values that decide something here.
const (
	codeSerializationFailure = "40001"
	codeDeadlockDetected     = "40P01"
	codeLockNotAvailable     = "55P03"
	codeQueryCanceled        = "57014"
	codeDivisionByZero       = "22012" // buckets_take_alone.sql undid itself

	// The classes that are about values.
	classDataException = "22"
	classConstraint    = "23"
)

// SQLState returns the SQLSTATE the server answered with, or "" when err is not a server's answer.
func SQLState(err error) string {
	if err == nil { // as mostly, and what errors.As needs is an allocation
		return ""
	}
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		return ""
	}
	return pgErr.Code
}

// IsRetryable reports whether a transaction lost against a concurrent one.
func IsRetryable(err error) bool {
	code := SQLState(err)
	return code == codeSerializationFailure || code == codeDeadlockDetected
}

// IsConflict is IsRetryable, and true when a statement outside a transaction has to be run again.
func IsConflict(err error) bool {
	return errors.Is(err, ErrStale) || IsRetryable(err) || SQLState(err) == codeDivisionByZero
}

// IsLockTimeout reports whether a statement waited for a row as long as lock_timeout allows.
func IsLockTimeout(err error) bool { return SQLState(err) == codeLockNotAvailable }

// isOfOne reports whether a statement for several calls failed for what may be the fault of one of them: a value
// that it was sent, as a key with characters that the database's encoding lacks, or a row that was waited for or changed
// meanwhile. The time that it took is nobody's: it waits for no row for long.
func isOfOne(err error) bool {
	switch code := SQLState(err); code {
	case codeLockNotAvailable, codeDeadlockDetected, codeSerializationFailure:
		return true
	default:
		return strings.HasPrefix(code, classDataException) || strings.HasPrefix(code, classConstraint)
	}
}
