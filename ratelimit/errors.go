package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/internal/pooler"
	"github.com/pgratelimit/pgratelimit/internal/reserved"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

var (
	// ErrLimited is what a refusal is when it has to travel as an error. [Decision.Err] returns a
	// [*LimitedError], and errors.Is(err, ErrLimited) finds it.
	ErrLimited = errors.New("ratelimit: limited")

	// ErrInvalidLimit is returned by NewLimit, and is what Define panics with, when a name or a policy
	// cannot be used; the message says which field and what to write instead. A call with the zero Limit
	// returns it too.
	ErrInvalidLimit = errors.New("ratelimit: invalid limit")

	// ErrInvalidRule is returned by NewRule when one of its policies, instants or words cannot be used.
	ErrInvalidRule = errors.New("ratelimit: invalid rule")

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

	// ErrInvalidRequest is returned before any SQL when a call asks for no limit, for too many, for one
	// bucket under two policies, or for what means nothing for the limit, as a Take of slots; by InTx without a function; and by Settle for a bucket that was not reserved.
	ErrInvalidRequest = errors.New("ratelimit: invalid request")

	// ErrNoReservations is returned by Reserve, before any SQL, for a limit whose policy forbids them.
	ErrNoReservations = errors.New("ratelimit: the limit takes no reservations")

	// ErrNotReserved is returned when no reservation has the ID: it was never made, its transaction was
	// rolled back, or it ended and Expire has deleted it.
	ErrNotReserved = reserved.ErrNotReserved

	// ErrReservationEnded is returned when a reservation has ended in another way than the call asks for:
	// Settle after Cancel, Cancel after Settle, either after expiry.
	ErrReservationEnded = reserved.ErrEnded

	// ErrLeaseLost is returned by RenewLease and Release when the lease is not held any more: it has ended, was released, or
	// was reset with its bucket, or its transaction was rolled back. Its slots may be others' by now, so stop the work, or
	// have what it writes compare fencing numbers; see [Lease].
	ErrLeaseLost = errors.New("ratelimit: the lease is lost")

	// ErrInvalidLease is returned by RenewLease and Release, before any SQL, for an ID that Acquire did not return: cut off,
	// changed, of a newer version, or empty, as that of an Acquire that was refused.
	ErrInvalidLease = errors.New("ratelimit: invalid lease ID")

	// ErrInvalidConfig is returned by New when the pool or a field of Config cannot be used, by every call on a Limiter that New
	// did not return or that WithTx bound to a nil transaction, and by Wait, Hold, Keep, Prune, Close and InTx on a Limiter of
	// WithTx. NewSimulation and the calls of a Simulation return it for the same reasons.
	ErrInvalidConfig = errors.New("ratelimit: invalid configuration")

	// ErrNotMigrated is returned when the schema lacks a table or a column. Run migrations.Up.
	ErrNotMigrated = errors.New("ratelimit: a table or a column is missing; run migrations.Up")

	// ErrHashKeyMismatch is returned by calls that name requests, and by InTx, when the keys in the tables are stored under
	// another secret than Config.HashKey, under none where one is set, or under one where none is: each program would have
	// full buckets of its own. Nothing was taken, and a caller's transaction goes on. The message says what to do.
	ErrHashKeyMismatch = errors.New("ratelimit: the tables belong to another HashKey")

	// ErrPoolerMode is returned by every call, and by InTx, when the statements that the connections prepare get lost on the way to the
	// server: pgx prepares statements by default, and behind a pooler in transaction mode, such as PgBouncer, the next one runs on another
	// connection of the server, where they are not. The first call of a Limiter finds that out before it sends anything else: nothing was taken, and a
	// caller's transaction goes on. Where it could not, a statement fails so (SQLSTATE 26000 or 42P05), and the transaction with it. The message
	// says which setting to change. A pooler in session mode, or one that keeps track of statements, is none of these.
	ErrPoolerMode = errors.New("ratelimit: prepared statements get lost on the way to the server")

	// ErrContended is returned by InTx, and by calls outside a transaction, when every attempt ended in a
	// conflict with other transactions. Nothing was taken. It wraps the last conflict. It is not a
	// refusal: the limit may well have tokens.
	ErrContended = store.ErrContended

	// ErrOverloaded is returned, before any SQL, by a call outside a transaction when too many calls wait already, as
	// Config.MaxWaiting says: the database is slower than the calls come. Nothing was taken.
	ErrOverloaded = errors.New("ratelimit: too many calls are waiting for the database; shed load, or raise Config.MaxWaiting")

	// ErrClosed is returned after Close by calls outside a transaction that take, read, reserve or acquire.
	ErrClosed = errors.New("ratelimit: the limiter is closed")

	// ErrCommitUnknown is returned by InTx when the connection failed after COMMIT was sent, or with Citus that of the coordinator
	// to a worker, so that the transaction is either wholly done or wholly undone and this process cannot tell which. It is not
	// retried, because a second run could take twice. Outside a transaction every call that writes returns it
	// where it sends a COMMIT of its own: Reserve, Prune, Expire and the calls on reservations always do; Take, Credit,
	// Refund, Charge and Reset do for limits with Shards, and over several limits when somebody held a row; and a Take
	// does at the edge of its limit when it is one of a batch, and where a wrong clock has to be put right. A Reserve that ends so may have made a reservation whose ID nobody knows; Expire ends it.
	// So may an Acquire, which does for several limits and beside others for the same slots, have taken a lease; it ends by itself.
	ErrCommitUnknown = errors.New("ratelimit: the outcome of the commit is unknown")
)

// SQLSTATE values that decide something here.
const (
	codeUndefinedTable       = "42P01"
	codeUndefinedColumn      = "42703"
	codeInvalidSchemaName    = "3F000"
	codeAdminShutdown        = "57P01"
	codeCrashShutdown        = "57P02"
	codeCannotConnectNow     = "57P03"
	codeTooManyConnections   = "53300"
	codeIdleInTransaction    = "25P03"
	codeQueryCanceled        = "57014"
	codeInternalError        = "XX000"
	classConnectionException = "08"

	codeInsufficientPrivilege = "42501"
	codeReadOnly              = "25006"
	codeNotSupported          = "0A000" // of BEGIN at SERIALIZABLE on a standby
)

// IsRetryable reports whether err says that a transaction lost against a concurrent one: it was rolled
// back whole, and running all of it again may succeed. It is for transactions of your own; InTx asks it
// for you. A retry inside the same transaction, or inside a savepoint of it, cannot succeed.
func IsRetryable(err error) bool { return store.IsRetryable(err) }

// IsUndecided reports whether err says that a call of this package, or InTx, failed so that there is no decision: the server could not be
// reached, was too slow or too contended, or the call asks what cannot be. Nothing may go on then, and nobody was refused. It is
// false of nil, of a refusal, and of errors that the caller's own code returned in InTx; of what calls on reservations and leases say of
// an ID; of a context that had ended before the call; and of ErrCommitUnknown, after which the work may be done.
func IsUndecided(err error) bool {
	for _, decided := range []error{
		ErrLimited, ErrCommitUnknown, ErrNotReserved, ErrReservationEnded, ErrLeaseLost, ErrInvalidLease,
	} {
		if errors.Is(err, decided) {
			return false
		}
	}
	for _, sentinel := range []error{
		ErrInvalidLimit, ErrInvalidKey, ErrInvalidCost, ErrCostExceedsCapacity, ErrInvalidRequest, ErrNoReservations, ErrInvalidConfig,
		ErrNotMigrated, ErrHashKeyMismatch, ErrPoolerMode, ErrContended, ErrOverloaded, ErrClosed,
	} {
		if errors.Is(err, sentinel) {
			return true
		}
	}
	var failed *callError
	return errors.As(err, &failed)
}

// isUnavailable reports whether the server could not be reached, or ended the connection, as it does when
// it shuts down, starts, or has none left.
func isUnavailable(err error) bool {
	var connectErr *pgconn.ConnectError
	if errors.As(err, &connectErr) {
		return true
	}
	switch code := store.SQLState(err); code {
	case codeAdminShutdown, codeCrashShutdown, codeCannotConnectNow, codeTooManyConnections, codeIdleInTransaction:
		return true
	default:
		return len(code) == 5 && code[:2] == classConnectionException
	}
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
	return errors.As(err, &pgErr) && pgErr.SeverityUnlocalized == "ERROR" && !isOfWorker(pgErr.Code)
}

// isOfWorker reports whether an error may be that of a server on which the one that answers has rows, of which it does not know
// what became there. A coordinator of Citus that cannot have a worker commit says XX000, whether the worker has refused, as for
// a conflict, or was lost.
func isOfWorker(code string) bool {
	switch code {
	case codeAdminShutdown, codeCrashShutdown, codeCannotConnectNow, codeInternalError:
		return true
	}
	return strings.HasPrefix(code, classConnectionException)
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

// toThePrimary is what to do where a server does not let anything be written.
const toThePrimary = "connect to the primary, as with target_session_attrs=read-write"

// explain adds to err what to do about it where the server's words do not say. schema is that of the tables, and inTx
// whether the call was in the caller's transaction.
func explain(err error, schema string, inTx bool) error {
	switch store.SQLState(err) {
	case codeUndefinedTable, codeUndefinedColumn, codeInvalidSchemaName:
		return fmt.Errorf("%w (schema %q): %w", ErrNotMigrated, schema, err)
	case codeInsufficientPrivilege:
		return fmt.Errorf("%w; the role needs USAGE on schema %q, and SELECT, INSERT, UPDATE and DELETE on its tables buckets, reservations and prices, and SELECT and INSERT on fingerprint: migrations.Grants has the statements", err, schema)
	case codeReadOnly:
		return fmt.Errorf("%w; the transaction may not write (default_transaction_read_only may be on), or the server is a standby: "+toThePrimary, err)
	}
	switch {
	case pooler.IsLost(err):
		return fmt.Errorf("%w: that happens behind a pooler in transaction mode, such as PgBouncer; %s: %w", ErrPoolerMode, pooler.Advice(0), err)
	case !errors.Is(err, context.DeadlineExceeded):
		return err
	case inTx:
		return fmt.Errorf("%w; another transaction may hold a row that the call waited for", err)
	}
	return fmt.Errorf("%w; a transaction may hold a row that the call waited for, or all connections of the pool: inside one, call the Limiter of WithTx", err)
}
