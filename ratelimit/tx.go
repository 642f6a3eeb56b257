package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

const (
	retryBase = 5 * time.Millisecond   // the first pause is up to this long
	retryCap  = 200 * time.Millisecond // and no pause is longer than this

	// maxReconnects bounds the attempts that end because the connection, not the transaction, failed: a
	// server that is down should be reported soon.
	maxReconnects = 3

	// endTimeout bounds COMMIT and ROLLBACK, which do not run on the caller's context: a caller who hangs up
	// would turn a commit into one of unknown outcome.
	endTimeout = 5 * time.Second
)

// InTx runs fn in a SERIALIZABLE transaction and commits when fn returns nil. When the transaction conflicts
// with another, at a statement or at COMMIT, it is rolled back and fn is run again from the start, on a
// new transaction, after a random pause; so fn must not do what cannot be repeated, and must return the
// errors of its statements. Pass tx to [Limiter.WithTx] to take limits in it.
//
// Transactions of one Limiter that met at a bucket queue for it from then on, each before its first
// statement if that is the one that takes from the bucket. So take limits first: a transaction that read
// something before has its snapshot by then, and has to be run again after the wait.
//
// An error of fn rolls back and is returned as it is, a *LimitedError among them. InTx returns ErrContended
// when no attempt of Config.MaxAttempts got through, the context's error when it ended meanwhile, and
// ErrCommitUnknown when the connection failed after COMMIT was sent, which is never retried. On every
// other error nothing was written and nothing was taken, unless fn ended the transaction itself.
//
// COMMIT runs to its end even when ctx is cancelled during it, for up to five seconds.
func (l *Limiter) InTx(ctx context.Context, fn func(tx pgx.Tx) error) error {
	switch {
	case l == nil || l.pool == nil:
		return fmt.Errorf("%w: InTx begins a transaction and needs a Limiter that New returned, not one of WithTx", ErrInvalidConfig)
	case fn == nil:
		return fmt.Errorf("%w: InTx without a function", ErrInvalidRequest)
	case ctx.Err() != nil:
		return fmt.Errorf("ratelimit: transaction: %w", ctx.Err())
	}
	if err := l.idle(); err != nil {
		return err
	}
	reconnects := 0
	places := &places{queues: l.queues, held: make(map[which]*queue)}
	began := l.watch()
	err := l.retry(ctx, "transaction", func() (again, error) {
		lost, err := l.attempt(ctx, places, fn)
		if places.waited > 0 {
			l.tell(ctx, Queued{Waited: places.waited})
		}
		switch {
		case errors.Is(err, ErrCommitUnknown), errors.Is(err, ErrContended): // the latter of a call that fn made
		case IsRetryable(err):
			l.queues.conflict(places.touched)
			if places.queued {
				return atOnce, err // it will wait for its turn
			}
			return afterPause, err
		case lost && reconnects < maxReconnects:
			reconnects++
			return afterPause, err
		}
		return never, err
	})
	if errors.Is(err, ErrContended) || errors.Is(err, ErrCommitUnknown) || isUnavailable(err) {
		l.fail(ctx, Failed{Verb: "transaction", Err: err}, began)
	}
	return err
}

// attempt runs fn in one transaction. lost says that the connection failed before COMMIT was sent, so
// that nothing was written.
func (l *Limiter) attempt(ctx context.Context, places *places, fn func(tx pgx.Tx) error) (lost bool, err error) {
	begun, err := l.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.Serializable})
	if err != nil {
		// Nothing was written, whatever broke, unless it is the server that says no.
		return isUnavailable(err) || sqlstate(err) == "", fmt.Errorf("ratelimit: begin: %w", err)
	}
	tx := &lentTx{Tx: begun, places: places, effects: &effects{}}
	defer places.release() // once the transaction has ended
	places.hold(ctx)       // BEGIN takes no snapshot, and whoever waits here has its connection already
	ended := false
	defer func() {
		if !ended { // fn failed, or panicked
			rollback(ctx, begun)
		}
	}()
	if err := fn(tx); err != nil {
		return !tx.ended && (isUnavailable(err) || begun.Conn().IsClosed() && ctx.Err() == nil), err
	}
	switch {
	case tx.ended:
		return false, fmt.Errorf("ratelimit: commit: fn ended the transaction itself: %w", pgx.ErrTxClosed)
	case ctx.Err() != nil:
		return false, fmt.Errorf("ratelimit: transaction: %w", ctx.Err())
	case begun.Conn().IsClosed():
		return true, fmt.Errorf("ratelimit: the connection was lost before the commit: %w", pgx.ErrTxClosed)
	}
	ended = true
	if err := commit(ctx, begun); err != nil {
		return false, err
	}
	l.committed(ctx, tx.effects)
	return false, nil
}

// lentTx is a transaction of InTx as fn has it, with its places in the queues. Once fn has ended it, its
// connection is back in the pool and may be in use there, and says nothing of this transaction any more.
type lentTx struct {
	pgx.Tx
	places  *places
	effects *effects
	ended   bool
}

// Commit commits the transaction, which InTx reports as an error: it is for InTx to do.
func (tx *lentTx) Commit(ctx context.Context) error {
	tx.ended = true
	return tx.Tx.Commit(ctx)
}

// Rollback rolls the transaction back; so does returning an error.
func (tx *lentTx) Rollback(ctx context.Context) error {
	tx.ended = true
	return tx.Tx.Rollback(ctx)
}

// commit ends tx. What comes back is nil, a definite rollback, or ErrCommitUnknown.
//
// It does not ask pgconn.SafeToRetry: in pgx 5.9 to 5.12 that is true of a connection that was lost while
// the answer to COMMIT was awaited.
func commit(ctx context.Context, tx pgx.Tx) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	err := tx.Commit(ctx)
	var pgErr *pgconn.PgError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, pgx.ErrTxCommitRollback):
		return fmt.Errorf("ratelimit: commit: a statement had failed and fn did not return its error: %w", err)
	case errors.As(err, &pgErr) && pgErr.SeverityUnlocalized == "ERROR":
		return fmt.Errorf("ratelimit: commit: %w", err)
	}
	return fmt.Errorf("%w: %w", ErrCommitUnknown, err)
}

// rollback ends tx even when ctx is cancelled. Its error says nothing that matters: a connection that
// cannot roll back is closed, and the server rolls back what it ran.
func rollback(ctx context.Context, tx pgx.Tx) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	_ = tx.Rollback(ctx)
}

// isUnavailable reports whether the server could not be reached, or ended the connection, as it does when
// it shuts down, starts, or has none left.
func isUnavailable(err error) bool {
	var connectErr *pgconn.ConnectError
	if errors.As(err, &connectErr) {
		return true
	}
	switch code := sqlstate(err); code {
	case codeAdminShutdown, codeCrashShutdown, codeCannotConnectNow, codeTooManyConnections, codeIdleInTransaction:
		return true
	default:
		return len(code) == 5 && code[:2] == classConnectionException
	}
}

// standalone runs a statement that is its own transaction, again when it conflicts with others. Bound
// to a transaction it runs it once: only the owner of the transaction can run it again.
func (l *Limiter) standalone(ctx context.Context, verb string, statement func() error) error {
	if l.pool == nil {
		return statement()
	}
	if err := l.idle(); err != nil {
		return err
	}
	return l.retry(ctx, verb, func() (again, error) {
		err := statement()
		switch {
		case errors.Is(err, errOvertaken):
			return atOnce, err
		case isConflict(err):
			return afterPause, err
		}
		return never, err
	})
}

// isConflict is IsRetryable, and true when a statement outside a transaction has to be run again.
func isConflict(err error) bool {
	return IsRetryable(err) || sqlstate(err) == codeDivisionByZero || errors.Is(err, errOvertaken)
}

// together runs fn on a Limiter bound to a transaction: the caller's when l is bound to one, else a READ
// COMMITTED one of its own, which is run again when it conflicts. An error of fn rolls that back.
func (l *Limiter) together(ctx context.Context, verb string, fn func(tx *Limiter) error) error {
	return l.retryHeld(ctx, func(l *Limiter) error { return l.togetherOnce(ctx, verb, fn) })
}

// togetherOnce is together, but returns a heldError when fn needs a row that somebody holds.
func (l *Limiter) togetherOnce(ctx context.Context, verb string, fn func(tx *Limiter) error) error {
	if l.pool == nil {
		err := fn(l)
		if err != nil && ctx.Err() != nil && !errors.Is(err, ErrNotReserved) {
			l.spoil(ctx)
		}
		return err
	}
	if err := l.idle(); err != nil {
		return err
	}
	return l.retry(ctx, verb, func() (again, error) {
		err := l.inTx(ctx, fn)
		if IsRetryable(err) {
			return afterPause, err
		}
		return never, err
	})
}

// inTx is together for what is run again by others when it conflicts.
func (l *Limiter) inTx(ctx context.Context, fn func(tx *Limiter) error) error {
	if l.pool == nil {
		return fn(l)
	}
	tx, err := l.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	bound := l.WithTx(tx)
	bound.effects, bound.own = &effects{}, true
	if err := fn(bound); err != nil {
		rollback(ctx, tx)
		return err
	}
	if err := commit(ctx, tx); err != nil {
		return err
	}
	l.committed(ctx, bound.effects)
	return nil
}

// spoil makes the caller's transaction one that can only be rolled back. A context that ends between two
// statements of a call stops it half-way and leaves the connection alive; one that ends during a statement
// closes it, which comes to the same.
func (l *Limiter) spoil(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	_, _ = l.db.Exec(ctx, "ROLLBACK TO SAVEPOINT "+savepoint+"_cancelled") // there is none
}

// idle returns an error when the pool is one connection that is in a transaction, which ours would end.
func (l *Limiter) idle() error {
	if conn, ok := l.pool.(*pgx.Conn); ok && !conn.IsClosed() && conn.PgConn().TxStatus() != 'I' {
		return fmt.Errorf("%w: the connection is in a transaction; use WithTx", ErrInvalidConfig)
	}
	return nil
}

// again says whether and when an attempt is to be made again.
type again int

const (
	never again = iota
	afterPause
	atOnce
)

// retry runs attempt until it does not ask for another, the attempts are used up, or ctx ends. The pause
// before the n-th retry is drawn evenly from 0 to min(retryCap, retryBase * 2^n): full jitter, after
// https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/.
func (l *Limiter) retry(ctx context.Context, verb string, attempt func() (again, error)) error {
	ceiling := retryBase
	for n := 1; ; n++ {
		when, err := attempt()
		if when == never {
			return err
		}
		l.tell(ctx, Conflicted{Verb: verb, Attempt: n, Err: err})
		switch {
		case ctx.Err() != nil:
			return fmt.Errorf("ratelimit: gave up after %d attempts: %w (last: %w)", n, ctx.Err(), err)
		case n >= l.config.MaxAttempts && !isConflict(err):
			return err
		case n >= l.config.MaxAttempts:
			return fmt.Errorf("%w: gave up after %d attempts: %w", ErrContended, n, err)
		}
		if when == atOnce {
			continue
		}
		if !pause(ctx, rand.N(ceiling)) {
			return fmt.Errorf("ratelimit: gave up after %d attempts: %w (last: %w)", n, ctx.Err(), err)
		}
		ceiling = min(2*ceiling, retryCap)
	}
}

// pause waits for d and reports whether ctx is still alive.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
