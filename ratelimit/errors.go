package ratelimit

import (
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

var (
	// ErrLimited is what a refusal is when it has to travel as an error. [Decision.Err] returns a
	// [*LimitedError], and errors.Is(err, ErrLimited) finds it.
	ErrLimited = errors.New("ratelimit: limited")

	// ErrInvalidLimit is returned by NewLimit, and is what Define panics with, when a name or a policy
	// cannot be used; the message says which field and what to write instead. A call with the zero Limit
	// returns it too.
	ErrInvalidLimit = errors.New("ratelimit: invalid limit")

	// ErrInvalidKey is returned before any SQL when a key is empty, too long, or not text that Postgres
	// can store.
	ErrInvalidKey = errors.New("ratelimit: invalid key")

	// ErrInvalidCost is returned before any SQL when a cost is not a number, negative, or so small beside
	// the capacity that taking it would change nothing.
	ErrInvalidCost = errors.New("ratelimit: invalid cost")

	// ErrCostExceedsCapacity is returned before any SQL when a request costs more than its limit can ever
	// hold (for Reserve: can ever hold and owe), so that no wait would help; and by Renew and Start when the limit was
	// lowered and can give as much no longer.
	ErrCostExceedsCapacity = errors.New("ratelimit: cost exceeds capacity")

	// ErrInvalidRequest is returned before any SQL when a call asks for no limit, for too many, or for one
	// bucket under two policies; by InTx without a function; and by Settle for a bucket that was not reserved.
	ErrInvalidRequest = errors.New("ratelimit: invalid request")

	// ErrNoReservations is returned by Reserve, before any SQL, for a limit whose policy forbids them.
	ErrNoReservations = errors.New("ratelimit: the limit takes no reservations")

	// ErrNotReserved is returned when no reservation has the ID: it was never made, its transaction was
	// rolled back, or it ended and Expire has deleted it.
	ErrNotReserved = errors.New("ratelimit: no such reservation")

	// ErrReservationEnded is returned when a reservation has ended in another way than the call asks for:
	// Settle after Cancel, Cancel after Settle, either after expiry.
	ErrReservationEnded = errors.New("ratelimit: the reservation has ended")

	// ErrInvalidConfig is returned by New when the pool or a field of Config cannot be used, and by calls
	// on a Limiter that was not made by New or is bound to no transaction.
	ErrInvalidConfig = errors.New("ratelimit: invalid configuration")

	// ErrNotMigrated is returned when the schema lacks a table or a column. Run migrations.Up.
	ErrNotMigrated = errors.New("ratelimit: a table or a column is missing; run migrations.Up")

	// ErrContended is returned by InTx, and by calls outside a transaction, when every attempt ended in a
	// conflict with other transactions. Nothing was taken. It wraps the last conflict. It is not a
	// refusal: the limit may well have tokens.
	ErrContended = errors.New("ratelimit: too much contention")

	// ErrOverloaded is returned, before any SQL, by a call outside a transaction when Config.MaxWaiting calls
	// are waiting already: the database is slower than the calls come. Nothing was taken.
	ErrOverloaded = errors.New("ratelimit: too many calls are waiting for the database; shed load, or raise Config.MaxWaiting")

	// ErrClosed is returned by Take, Check, Value and Reserve outside a transaction after Close.
	ErrClosed = errors.New("ratelimit: the limiter is closed")

	// ErrCommitUnknown is returned by InTx when the connection failed after COMMIT was sent, so that the
	// transaction is either wholly done or wholly undone and this process cannot tell which. It is not
	// retried, because a second run could take twice. Outside a transaction every call that writes returns it
	// where it sends a COMMIT of its own: Reserve, Prune, Expire and the calls on reservations always do; Take, Credit,
	// Refund, Charge and Reset do for limits with Shards, and over several limits when somebody held a row; and a Take that
	// is one of a batch does at the edge of its limit. A Reserve that ends so may have made a reservation whose ID nobody knows; Expire ends it.
	ErrCommitUnknown = errors.New("ratelimit: the outcome of the commit is unknown")
)

// SQLSTATE values that decide something here.
const (
	codeSerializationFailure = "40001"
	codeDeadlockDetected     = "40P01"
	codeLockNotAvailable     = "55P03"
	codeQueryCanceled        = "57014" // statement_timeout too
	codeDivisionByZero       = "22012" // buckets_take_alone.sql undid itself
	codeUndefinedTable       = "42P01"
	codeUndefinedColumn      = "42703"
	codeInvalidSchemaName    = "3F000"
	codeAdminShutdown        = "57P01"
	codeCrashShutdown        = "57P02"
	codeCannotConnectNow     = "57P03"
	codeTooManyConnections   = "53300"
	codeIdleInTransaction    = "25P03"
	classConnectionException = "08"

	codeInsufficientPrivilege = "42501"
	codeReadOnly              = "25006"
)

// IsRetryable reports whether err says that a transaction lost against a concurrent one: it was rolled
// back whole, and running all of it again may succeed. It is for transactions of your own; InTx asks it
// for you. A retry inside the same transaction, or inside a savepoint of it, cannot succeed.
func IsRetryable(err error) bool {
	if err == nil { // as mostly, and what errors.As needs is an allocation
		return false
	}
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		return false
	}
	return pgErr.Code == codeSerializationFailure || pgErr.Code == codeDeadlockDetected
}

// sqlstate returns the SQLSTATE the server answered with, or "" when err is not a server's answer.
func sqlstate(err error) string {
	if err == nil {
		return ""
	}
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		return ""
	}
	return pgErr.Code
}

// changedNothing reports whether a call that failed with err is known to have changed nothing: it was not sent, or the
// server undid it.
func changedNothing(err error) bool {
	var pgErr *pgconn.PgError
	switch {
	case errors.Is(err, ErrCommitUnknown):
		return false
	case errors.Is(err, ErrClosed), errors.Is(err, ErrOverloaded):
		return true
	}
	return errors.As(err, &pgErr) && pgErr.SeverityUnlocalized == "ERROR"
}

// callError is what a call failed with, and what was being done.
type callError struct {
	text string
	err  error
}

func (e *callError) Error() string { return e.text }
func (e *callError) Unwrap() error { return e.err }

// prefix is what the text of every error of this package begins with.
const prefix = "ratelimit: "

// prefixed returns err with a text that has the prefix once, at its beginning, however many of the errors in it
// begin with it.
func prefixed(err error) error {
	return &callError{prefix + strings.ReplaceAll(err.Error(), prefix, ""), err}
}

// during returns err with what was being done.
func during(doing string, err error) error { return prefixed(fmt.Errorf("%s: %w", doing, err)) }
