package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

const (
	retryBase = 5 * time.Millisecond   // the first pause is up to this long
	retryCap  = 200 * time.Millisecond // and no pause is longer than this
)

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
			return prefixed(fmt.Errorf("gave up after %d attempts: %w (last: %w)", n, ctx.Err(), err))
		case n >= l.config.MaxAttempts && !isConflict(err):
			return err
		case n >= l.config.MaxAttempts:
			return prefixed(fmt.Errorf("%w: gave up after %d attempts: %w", ErrContended, n, err))
		}
		if when == atOnce {
			continue
		}
		if !pause(ctx, rand.N(ceiling)) {
			return prefixed(fmt.Errorf("gave up after %d attempts: %w (last: %w)", n, ctx.Err(), err))
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
