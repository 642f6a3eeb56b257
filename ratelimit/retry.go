package ratelimit

import (
	"context"
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

// retry runs attempt until it does not ask for another, the attempts are used up, or ctx ends. The pause
// before the n-th retry is drawn evenly from 0 to min(retryCap, retryBase * 2^(n-1)), where a retry at once does not count:
// full jitter, after
// https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/.
func (l *Limiter) retry(ctx context.Context, verb string, attempt func() (again, error)) error {
	ceiling := retryBase
	for n := 1; ; n++ {
		when, err := attempt()
		if when == never {
			return err
		}
		l.reports.tell(ctx, Conflicted{Verb: verb, Attempt: n, Err: err})
		switch {
		case ctx.Err() != nil:
			return prefixed(fmt.Errorf("gave up after %d attempts: %w (last: %w)", n, ctx.Err(), err))
		case n >= l.config.MaxAttempts && !store.IsConflict(err):
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
