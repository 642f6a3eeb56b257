package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/store"
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

// whenAgain returns when a statement is to be run again that failed with err.
func whenAgain(err error) again {
	switch {
	case errors.Is(err, store.ErrStale):
		return atOnce
	case store.IsConflict(err):
		return afterPause
	}
	return never
}

// retry runs attempt again, after one that ended with err, until it does not ask for another, the attempts are used up, or
// ctx ends. The pause before the n-th retry is drawn evenly from 0 to min(retryCap, retryBase * 2^(n-1)), where a retry at
// once does not count: full jitter, after
// https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/.
func (l *Limiter) retry(ctx context.Context, verb string, when again, err error, attempt func() (again, error)) error {
	ceiling := retryBase
	for n := 1; when != never; n++ {
		l.reports.tell(ctx, Conflicted{Verb: verb, Attempt: n, Err: err})
		switch {
		case ctx.Err() != nil:
			return prefixed(fmt.Errorf("gave up after %d attempts: %w (last: %w)", n, ctx.Err(), err))
		case n >= l.config.MaxAttempts && !store.IsConflict(err):
			return err
		case n >= l.config.MaxAttempts:
			return prefixed(fmt.Errorf("%w: gave up after %d attempts: %w", ErrContended, n, err))
		}
		if when == afterPause {
			if !pause(ctx, rand.N(ceiling)) {
				return prefixed(fmt.Errorf("gave up after %d attempts: %w (last: %w)", n, ctx.Err(), err))
			}
			ceiling = min(2*ceiling, retryCap)
		}
		when, err = attempt()
	}
	return err
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
