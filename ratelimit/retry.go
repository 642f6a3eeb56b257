package ratelimit

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/store"
)

const (
	retryBase = 5 * time.Millisecond   // the first pause is up to this long
	retryCap  = 200 * time.Millisecond // no pause is longer than this
)

// again says whether and when to run an attempt again.
type again int

const (
	never again = iota
	afterPause
	atOnce
)

// whenAgain returns when to run a statement again that failed with err.
func whenAgain(err error) again {
	if store.IsRetryable(err) {
		return afterPause
	}
	return never
}

// retry runs attempt again after it failed with err, until it returns never, the attempts are used up, or ctx ends. The
// pause before the n-th retry is random, from 0 to min(retryCap, retryBase * 2^(n-1)), not counting retries at once.
// This is full jitter: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/.
func retry(ctx context.Context, l *Limiter, verb string, when again, err error, attempt func() (again, error)) error {
	ceiling := retryBase
	for n := 1; when != never; n++ {
		if store.IsRetryable(err) { // otherwise the connection was lost
			l.reports.tell(ctx, Conflicted{Verb: verb, Attempt: n, Err: err})
		}
		switch {
		case ctx.Err() != nil:
			return prefixed(fmt.Errorf("gave up after %d attempts: %w (last: %w)", n, ctx.Err(), err))
		case n >= l.config.MaxAttempts && !store.IsRetryable(err):
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

// pause waits for d. It returns false if ctx ends first.
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

// Jitter returns a random duration from 0 up to, but not including, span. It returns 0 if span is not above 0. Add it
// to a RetryAfter or ReadyAt that many callers share, so that they do not all return at once. Do not subtract it: a
// caller that returns early is refused.
func Jitter(span time.Duration) time.Duration {
	if span <= 0 {
		return 0
	}
	return rand.N(span)
}

// JitterFor is a Jitter that is partly fixed: identity determines share of the span, from 0 to 1, and chance the rest.
// So each client returns in the same place among the others at every call and from every process, and different clients
// in different places.
//
//	offset = span * (share * place(identity) + (1 - share) * chance)        place, chance in [0, 1)
//
// A share of 1 leaves nothing to chance, and a share of 0 everything. A share above 1 counts as 1. A share below 0, or
// not a number, counts as 0.
func JitterFor(identity string, span time.Duration, share float64) time.Duration {
	if span <= 0 {
		return 0
	}
	if !(share > 0) {
		return Jitter(span)
	}
	fixed := min(time.Duration(float64(span)*min(share, 1)), span)
	own := min(time.Duration(place(identity)*float64(fixed)), max(fixed-1, 0)) // rounding may reach fixed
	return own + Jitter(span-fixed)
}

// place returns a number in [0, 1) that depends only on identity.
func place(identity string) float64 {
	sum := sha256.Sum256([]byte(identity))
	return float64(binary.BigEndian.Uint64(sum[:8])>>11) / (1 << 53)
}
