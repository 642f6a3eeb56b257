package ratelimit

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
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
	if store.IsConflict(err) {
		return afterPause
	}
	return never
}

// retry runs attempt again, after one that ended with err, until it does not ask for another, the attempts are used up, or
// ctx ends. The pause before the n-th retry is drawn evenly from 0 to min(retryCap, retryBase * 2^(n-1)), where a retry at
// once does not count: full jitter, after
// https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/.
func retry(ctx context.Context, l *Limiter, verb string, when again, err error, attempt func() (again, error)) error {
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

// Spread returns a random duration from 0 up to, and not including, span: 0 when span is not above 0. Add
// it to a RetryAfter or a ReadyAt that many share, so that they do not all come back at once. Only
// add: whoever comes sooner is refused.
func Spread(span time.Duration) time.Duration {
	if span <= 0 {
		return 0
	}
	return rand.N(span)
}

// SpreadFor is Spread with a memory: share of the span, from 0 to 1, is decided by the identity and only
// the rest by chance. A client keeps its place among the others then, from call to call and from process to
// process, and different clients get different places.
//
//	offset = span * (share * place(identity) + (1 - share) * chance)        place, chance in [0, 1)
//
// With a share of 1 nothing is left to chance, with 0 everything is. A share out of range, or not a
// number, counts as the nearest of the two, or as 0.
func SpreadFor(identity string, span time.Duration, share float64) time.Duration {
	if span <= 0 {
		return 0
	}
	if !(share > 0) {
		return Spread(span)
	}
	fixed := min(time.Duration(float64(span)*min(share, 1)), span)
	own := min(time.Duration(place(identity)*float64(fixed)), max(fixed-1, 0)) // rounding may reach fixed
	return own + Spread(span-fixed)
}

// place returns a number in [0, 1) that only depends on identity.
func place(identity string) float64 {
	sum := sha256.Sum256([]byte(identity))
	return float64(binary.BigEndian.Uint64(sum[:8])>>11) / (1 << 53)
}
