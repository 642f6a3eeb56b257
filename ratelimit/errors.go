package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/internal/engine/preflight"
	"github.com/pgratelimit/pgratelimit/internal/engine/reserved"
	"github.com/pgratelimit/pgratelimit/internal/engine/store"
	"github.com/pgratelimit/pgratelimit/internal/pgerr"
)

var (
	// ErrLimited matches a refusal that was returned as an error: errors.Is(err, ErrLimited) is true for a
	// [*LimitedError].
	ErrLimited = errors.New("ratelimit: limited")

	// ErrInvalidLimit means that a limit's name or policy is invalid, or that a call got the zero Limit. The message names
	// the field and a valid value.
	ErrInvalidLimit = errors.New("ratelimit: invalid limit")

	// ErrInvalidRule is returned by NewRuling for an invalid policy, instant, mode or change.
	ErrInvalidRule = errors.New("ratelimit: invalid rule")

	// ErrInvalidKey is returned before any SQL if a key is empty, too long, or not text that Postgres can store.
	ErrInvalidKey = errors.New("ratelimit: invalid key")

	// ErrInvalidCost is returned before any SQL if a cost is negative, not a number, or so small beside the capacity that
	// taking it would change nothing, and for a fraction of a slot.
	ErrInvalidCost = errors.New("ratelimit: invalid cost")

	// ErrCostExceedsCapacity is returned before any SQL if a request costs more than its limit can ever hold (for Reserve:
	// hold and owe), so waiting won't help. Renew and Start return it if the limit was lowered below the cost.
	ErrCostExceedsCapacity = errors.New("ratelimit: cost exceeds capacity")

	// ErrInvalidRequest is returned before any SQL for a call that can't be made. For example, it names no limit, too
	// many, one bucket under two policies, or a limit of another kind, such as a Take of slots. Settle returns it for a
	// bucket that wasn't reserved, and InTx without a function.
	ErrInvalidRequest = errors.New("ratelimit: invalid request")

	// ErrNoReservations is returned by Reserve, before any SQL, for a limit whose policy forbids them.
	ErrNoReservations = errors.New("ratelimit: the limit takes no reservations")

	// ErrNotReserved means that the reservation doesn't exist: it was never made, its transaction was rolled back, or it
	// ended and Expire has deleted it.
	ErrNotReserved = reserved.ErrNotReserved

	// ErrReservationEnded means that the reservation has already ended in another way: Settle returns it after Cancel,
	// Cancel after Settle, both after expiry, and Start after Cancel.
	ErrReservationEnded = reserved.ErrEnded

	// ErrLeaseLost is returned by RenewLease and Release if the lease isn't held: it ended, was released, was reset with
	// its bucket, or its transaction was rolled back. Others may have its slots, so stop the work, or compare fencing
	// numbers when you write; see [Lease].
	ErrLeaseLost = errors.New("ratelimit: the lease is lost")

	// ErrInvalidLease is returned by RenewLease and Release, before any SQL, for an ID that Acquire didn't return, for
	// example because it's cut off, from a newer version, or empty after a refusal.
	ErrInvalidLease = errors.New("ratelimit: invalid lease ID")

	// ErrInvalidConfig is returned by New and NewSimulation if the pool or a field of Config is invalid. All calls return
	// it on a Limiter that New didn't make, or that WithTx bound to a nil transaction. Hold, Prune, Close and InTx return
	// it on a Limiter of WithTx.
	ErrInvalidConfig = errors.New("ratelimit: invalid configuration")

	// ErrNotMigrated is returned if the schema lacks a table, a column or a function. Run migrations.Up.
	ErrNotMigrated = pgerr.ErrNotMigrated

	// ErrHashKeyMismatch is returned by InTx and by calls with keys if the tables' keys were stored under another
	// Config.HashKey, or if only the program or only the tables have one, because otherwise each program would have full
	// buckets of its own. Nothing was taken, your transaction stays usable, and the message says how to correct it.
	ErrHashKeyMismatch = errors.New("ratelimit: the tables belong to another HashKey")

	// ErrPoolerMode is returned by every call if a connection pooler loses prepared statements, which pgx uses by default.
	// A pooler in transaction mode, such as PgBouncer, can run the next statement on a server connection that doesn't know
	// them. Poolers in session mode, and those that track prepared statements, don't lose them.
	//
	// A Limiter's first call checks this before it sends anything else, so nothing was taken and your transaction stays
	// usable. If the check wasn't possible, a later statement fails (SQLSTATE 26000 or 42P05), and its transaction with
	// it. The message says which setting to change.
	ErrPoolerMode = errors.New("ratelimit: prepared statements get lost on the way to the server")

	// ErrContended is returned by InTx, and by calls outside a transaction, if every attempt conflicted with other
	// transactions. Nothing was taken. It wraps the last conflict. It isn't a refusal, because the limit may have tokens.
	ErrContended = store.ErrContended

	// ErrOverloaded is returned, before any SQL, by calls outside a transaction if more calls than Config.MaxWaiting wait
	// for the database. Nothing was taken.
	ErrOverloaded = errors.New("ratelimit: too many calls are waiting for the database; shed load, or raise " +
		"Config.MaxWaiting")

	// ErrClosed is returned after Close by calls outside a transaction that take, read, reserve or acquire.
	ErrClosed = errors.New("ratelimit: the limiter is closed")

	// ErrCommitUnknown is returned by InTx if the connection failed after COMMIT was sent (on Citus, the coordinator's
	// connection to a worker counts, too). The transaction is either fully committed or fully rolled back, and this
	// process can't tell which, so InTx doesn't retry: a second run could take twice. After every other error of InTx
	// nothing was taken.
	//
	// Outside a transaction, each call that sends its own COMMIT can return it. Prune and Expire always send one, and so
	// do Reserve and the calls on reservations, or they commit by one statement and can return it as well. Take, Credit,
	// CreditTaken, Charge and Reset do so for several limits or rows of Shards, if another transaction held a row. A Take
	// also does so in a batch that nearly empties the bucket, and when it corrects a wrong clock's row.
	//
	// Any other call is one statement. If its connection is lost or its context ends after it was sent, it may have taken
	// tokens as well, although the error doesn't wrap ErrCommitUnknown. If the server returned the error, a
	// *pgconn.PgError of severity ERROR, or if it's another error from this list, nothing was taken.
	//
	// A Reserve that returns it may have made a reservation whose ID is lost; Expire ends it. An Acquire may have taken a
	// lease, which ends by itself. Acquire sends a COMMIT for several limits, and beside other calls for the same slots.
	ErrCommitUnknown = errors.New("ratelimit: the outcome of the commit is unknown")
)

// SQLSTATE values that this package tests for.
const (
	codeAdminShutdown        = "57P01"
	codeCrashShutdown        = "57P02"
	codeCannotConnectNow     = "57P03"
	codeTooManyConnections   = "53300"
	codeIdleInTransaction    = "25P03"
	codeInternalError        = "XX000"
	codeCompletionUnknown    = "40003" // of servers that speak the protocol of Postgres
	classConnectionException = "08"
	codeNotSupported         = "0A000" // of BEGIN at SERIALIZABLE on a standby
)

// IsRetryable reports whether a transaction of your own failed because it conflicted with a concurrent one. It was
// rolled back, so run all of it again; a retry inside it, or inside one of its savepoints, can't succeed. InTx does
// this itself.
func IsRetryable(err error) bool { return store.IsRetryable(err) }

// IsUndecided reports whether a call of this package, or InTx, failed without a decision. For example, the server was
// unreachable, too slow or too contended, or the request was invalid. Reject the request, but don't report a refusal.
//
// It's false for nil, for your own code's errors in InTx, for a context that had ended before the call, and for an
// error that wraps one of these, even beside others: a refusal, ErrCommitUnknown (the work may be done), or an error
// about the ID of a reservation or lease.
func IsUndecided(err error) bool {
	for _, decided := range []error{
		ErrLimited, ErrCommitUnknown, ErrNotReserved, ErrReservationEnded, ErrLeaseLost, ErrInvalidLease,
	} {
		if errors.Is(err, decided) {
			return false
		}
	}
	for _, sentinel := range []error{
		ErrInvalidLimit, ErrInvalidKey, ErrInvalidCost, ErrCostExceedsCapacity, ErrInvalidRequest, ErrNoReservations,
		ErrInvalidConfig,
		ErrNotMigrated, ErrHashKeyMismatch, ErrPoolerMode, ErrContended, ErrOverloaded, ErrClosed,
	} {
		if errors.Is(err, sentinel) {
			return true
		}
	}
	var failed *callError
	return errors.As(err, &failed)
}

// isUnavailable reports whether the server was unreachable or ended the connection: it shuts down, starts, or has no
// connection left.
func isUnavailable(err error) bool {
	var connectErr *pgconn.ConnectError
	if errors.As(err, &connectErr) {
		return true
	}
	switch code := pgerr.Code(err); code {
	case codeAdminShutdown, codeCrashShutdown, codeCannotConnectNow, codeTooManyConnections, codeIdleInTransaction:
		return true
	default:
		return len(code) == 5 && code[:2] == classConnectionException
	}
}

func isOfContext(ctx context.Context, err error) bool {
	ended := ctx.Err()
	return ended != nil && (errors.Is(err, ended) || pgerr.Code(err) == pgerr.QueryCanceled)
}

// changedNothing reports whether a call that failed with err certainly changed nothing: it was not sent, or the server
// undid it.
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

// isOfWorker reports whether a coordinator may relay an error of a worker, whose transaction may have committed. A
// coordinator of Citus returns XX000 if a worker cannot commit, whether the worker refused, for example after a
// conflict, or was lost.
func isOfWorker(code string) bool {
	switch code {
	case codeAdminShutdown, codeCrashShutdown, codeCannotConnectNow, codeInternalError, codeCompletionUnknown:
		return true
	}
	return strings.HasPrefix(code, classConnectionException)
}

// callError is the error of a call, with the action that failed in its text.
type callError struct {
	text string
	err  error
}

func (e *callError) Error() string { return e.text }
func (e *callError) Unwrap() error { return e.err }

const prefix = "ratelimit: "

// prefixed returns err with a text that has the prefix only once, at its beginning.
func prefixed(err error) error {
	return &callError{prefix + strings.ReplaceAll(err.Error(), prefix, ""), err}
}

func during(doing string, err error) error { return prefixed(fmt.Errorf("%s: %w", doing, err)) }

// toThePrimary tells what to do if a server is read-only.
const toThePrimary = "connect to the primary, as with target_session_attrs=read-write"

// explain adds to err what to do about it, if the server's message does not say so. schema is the schema of the tables.
// inTx is whether the call was in the caller's transaction.
func explain(err error, schema string, inTx bool) error {
	err = pgerr.Explain(err, schema, "USAGE, and SELECT, INSERT, UPDATE and DELETE on its tables buckets, leases and "+
		"reservations, "+
		"and SELECT, INSERT and UPDATE on fingerprint, and EXECUTE on its functions")
	switch {
	case pgerr.Code(err) == pgerr.ReadOnly:
		return fmt.Errorf("%w; the transaction may not write (default_transaction_read_only may be on), or the server is a "+
			"standby: "+toThePrimary, err)
	case preflight.IsLost(err):
		return fmt.Errorf("%w: that happens behind a pooler in transaction mode, such as PgBouncer; %s: %w", ErrPoolerMode,
			preflight.Advice(0), err)
	case inTx && errors.Is(err, pgx.ErrTxClosed):
		return fmt.Errorf("%w; the transaction of WithTx has ended: call the Limiter before its commit or rollback", err)
	case strings.Contains(err.Error(), "conn busy"): // pgx has no value for it
		return fmt.Errorf("%w; rows of an earlier query on the connection are open: close them before you call the "+
			"Limiter, and "+
			"use the connection on one goroutine at a time", err)
	case !errors.Is(err, context.DeadlineExceeded):
		return err
	case inTx:
		return fmt.Errorf("%w; another transaction may hold a row that the call waited for", err)
	}
	return fmt.Errorf("%w; a transaction may hold a row that the call waited for, or all connections of the pool: "+
		"inside one, call the Limiter of WithTx", err)
}

// leaveReadOnly closes idle connections of the pool to a read-only server, if err came from one. It leaves other pools
// than pgx's unchanged.
func leaveReadOnly(ctx context.Context, l *Limiter, err error) {
	pool, ok := l.pool.(*pgxpool.Pool)
	if state := pgerr.Code(err); ok && (state == pgerr.ReadOnly || state == codeNotSupported) {
		l.leaving.Leave(ctx, pool)
	}
}

// explained returns the error of a call of l, with the action that failed and with explain's advice. Outside the
// caller's transaction it also leaves a read-only server. If a table is missing, the next call compares the fingerprint
// again, because new tables can have another secret. If ctx has ended, its error is added to query_canceled: pgx
// returns only that if the pool sends cancel requests.
func explained(ctx context.Context, l *Limiter, doing string, err error) error {
	if ended := ctx.Err(); isOfContext(ctx, err) && !errors.Is(err, ended) {
		err = fmt.Errorf("%w: %w", ended, err)
	}
	inTx := l.pool == nil
	if !inTx {
		leaveReadOnly(ctx, l, err)
	}
	// which has a timeout of its own
	if errors.Is(err, context.DeadlineExceeded) && !errors.As(err, new(*pgconn.ConnectError)) {
		switch {
		case ctx.Err() != nil:
			err = fmt.Errorf("%w (the deadline of the call's context)", err)
		case !inTx && l.config.Timeout > 0:
			err = fmt.Errorf("%w (Config.Timeout, %v)", err, l.config.Timeout)
		}
	}
	err = explain(err, l.config.Schema, inTx)
	if errors.Is(err, ErrNotMigrated) {
		l.gate.Forget()
	}
	return during(doing, err)
}

// CapacityError is the error of a call that costs more than a limit can ever give. It wraps ErrCostExceedsCapacity.
type CapacityError struct {
	// Limit is the limit's name.
	Limit string
	// Cost is the cost of the call, and Most the highest possible one.
	Cost, Most float64
}

func (e *CapacityError) Error() string {
	return fmt.Sprintf("%v: %v of %q, which allows at most %v; lower the cost or raise the capacity",
		ErrCostExceedsCapacity, e.Cost, e.Limit, e.Most)
}

// Unwrap returns ErrCostExceedsCapacity.
func (e *CapacityError) Unwrap() error { return ErrCostExceedsCapacity }

// isUnsent reports whether pgx refused to send a batch, because an argument can't be encoded, and closed the
// connection. A batch whose statements can't be prepared is such an error, too, but then the connection may have been
// lost.
func isUnsent(err error) bool {
	var unsent pgx.ErrPreprocessingBatch
	return errors.As(err, &unsent) && strings.HasPrefix(unsent.Error(), "error preprocessing batch (build)")
}

// begunWith returns the error of BEGIN. Nothing was written. The connection is lost unless the server refused to begin.
func begunWith(err error) (lost bool, _ error) {
	lost = isUnavailable(err) || pgerr.Code(err) == ""
	if pgerr.Code(err) == codeNotSupported {
		err = fmt.Errorf("%w; the server is a standby: "+toThePrimary, err)
	}
	return lost, during("begin", err)
}

// hasFailed reports whether the database or a concurrent transaction failed a transaction, so that its decisions do not
// count.
func hasFailed(lost bool, err error) bool {
	return lost || isUnavailable(err) || IsRetryable(err) || errors.Is(err, ErrContended) ||
		errors.Is(err, ErrCommitUnknown)
}

// isRolledBack reports whether the error of a statement that commits says that it has not.
func isRolledBack(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.SeverityUnlocalized == "ERROR" && !isOfWorker(pgErr.Code) ||
		pgerr.Code(err) == codeIdleInTransaction
}
