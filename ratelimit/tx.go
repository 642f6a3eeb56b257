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
// An error of fn rolls back and is returned as it is, a *LimitedError among them. InTx returns ErrContended
// when no attempt of Config.MaxAttempts got through, the context's error when it ended meanwhile, and
// ErrCommitUnknown when the connection failed after COMMIT was sent, which is never retried. On every
// other error nothing was written and nothing was taken.
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
	reconnects := 0
	return l.retry(ctx, func() (bool, error) {
		lost, err := l.attempt(ctx, fn)
		if lost {
			reconnects++
		}
		return IsRetryable(err) && !errors.Is(err, ErrCommitUnknown) || lost && reconnects <= maxReconnects, err
	})
}

// attempt runs fn in one transaction. lost says that the connection failed before COMMIT was sent, so
// that nothing was written.
func (l *Limiter) attempt(ctx context.Context, fn func(tx pgx.Tx) error) (lost bool, err error) {
	tx, err := l.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.Serializable})
	if err != nil {
		return isUnavailable(err), fmt.Errorf("ratelimit: begin: %w", err)
	}
	ended := false
	defer func() {
		if !ended { // fn failed, or panicked
			rollback(ctx, tx)
		}
	}()
	if err := fn(tx); err != nil {
		return isUnavailable(err) || tx.Conn().IsClosed() && ctx.Err() == nil, err
	}
	switch {
	case ctx.Err() != nil:
		return false, fmt.Errorf("ratelimit: transaction: %w", ctx.Err())
	case tx.Conn().IsClosed():
		return true, fmt.Errorf("ratelimit: the connection was lost before the commit: %w", pgx.ErrTxClosed)
	}
	ended = true
	return false, commit(ctx, tx)
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
	case errors.Is(err, pgx.ErrTxClosed):
		return fmt.Errorf("ratelimit: commit: fn ended the transaction itself: %w", err)
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
func (l *Limiter) standalone(ctx context.Context, statement func() error) error {
	if l.pool == nil {
		return statement()
	}
	return l.retry(ctx, func() (bool, error) {
		err := statement()
		return IsRetryable(err) || sqlstate(err) == codeDivisionByZero, err
	})
}

// retry runs attempt until it does not ask for another, the attempts are used up, or ctx ends. The pause
// before the n-th retry is drawn evenly from 0 to min(retryCap, retryBase * 2^n): full jitter, after
// https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/.
func (l *Limiter) retry(ctx context.Context, attempt func() (again bool, err error)) error {
	ceiling := retryBase
	for n := 1; ; n++ {
		again, err := attempt()
		switch {
		case !again:
			return err
		case ctx.Err() != nil:
			return fmt.Errorf("ratelimit: gave up after %d attempts: %w (last: %w)", n, ctx.Err(), err)
		case n >= l.config.MaxAttempts:
			return fmt.Errorf("%w: gave up after %d attempts: %w", ErrContended, n, err)
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
