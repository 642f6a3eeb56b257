package contender

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Take is the limiter's Take outside of a transaction.
type Take struct {
	Keys         int  // buckets of each limit
	Limits       int  // in one call; 0 is 1
	Empty        bool // the buckets hold nothing, and every call is refused
	Unbatched    bool // one statement for each call
	RefusalCache int  // entries of the refusal cache; 0: none
	Relaxed      bool // commits are relaxed
}

// Open makes the buckets and a Limiter.
func (w Take) Open(ctx context.Context, b Bench) (Runner, error) {
	return openLimiter(ctx, b, limiterOptions{unbatched: w.Unbatched, refusalCache: w.RefusalCache, relaxed: w.Relaxed}, func(limiter *ratelimit.Limiter, r *runner) error {
		limits, err := w.fill(ctx, b)
		if err != nil {
			return err
		}
		r.call = w.call(limiter, limits)
		opened := time.Now()
		r.check = func(ctx context.Context, calls int) error {
			for _, limit := range limits {
				if err := w.check(ctx, b, limit, float64(calls), time.Since(opened)); err != nil {
					return err
				}
			}
			return nil
		}
		return nil
	})
}

// fill makes the limits and their buckets.
func (w Take) fill(ctx context.Context, b Bench) ([]ratelimit.Limit, error) {
	policy := policyFor(w.Keys)
	tokens := policy.Capacity
	if w.Empty {
		tokens = 0
	}
	limits := make([]ratelimit.Limit, max(w.Limits, 1))
	for i := range limits {
		limits[i] = ratelimit.Define(fmt.Sprintf("%s:%d", b.Name, i), policy)
		if err := fill(ctx, b.Database, limits[i].Name(), w.Keys, tokens); err != nil {
			return nil, err
		}
	}
	return limits, nil
}

// emptyCost is what calls on empty buckets ask for: more than arrives while they are measured.
const emptyCost = roomyCapacity / 2

// call returns a call of Take as an application makes it.
func (w Take) call(limiter *ratelimit.Limiter, limits []ratelimit.Limit) load.Call {
	all, cost := makeKeys(w.Keys), 1.0
	if w.Empty {
		cost = emptyCost
	}
	if len(limits) == 1 {
		limit := limits[0]
		return func(ctx context.Context, c *load.Caller) error {
			d, err := limiter.Take(ctx, limit.For(all.any(c)).Cost(cost))
			return w.judge(d, err)
		}
	}
	return func(ctx context.Context, c *load.Caller) error {
		requests := make([]ratelimit.Request, len(limits))
		for i, limit := range limits {
			requests[i] = limit.For(all.any(c)).Cost(cost)
		}
		d, err := limiter.Take(ctx, requests...)
		return w.judge(d, err)
	}
}

func (w Take) judge(d ratelimit.Decision, err error) error {
	if !w.Empty {
		return allowed(d, err)
	}
	if err == nil && d.Allowed {
		return errors.New("a call on an empty bucket was allowed")
	}
	return err
}

// allowed returns an error unless the decision allows the call.
func allowed(d ratelimit.Decision, err error) error {
	if err == nil && !d.Allowed {
		return fmt.Errorf("a call on a bucket that has enough was refused: %w", d.Err())
	}
	return err
}

// check compares what is gone from the buckets with the calls that were answered: not a token less, and more
// only by what arrived meanwhile.
func (w Take) check(ctx context.Context, b Bench, limit ratelimit.Limit, calls float64, elapsed time.Duration) error {
	if w.Empty {
		calls = limit.Capacity() * float64(w.Keys) // what was gone in the beginning
	}
	return checkTaken(ctx, b, limit, w.Keys, calls, elapsed)
}

// checkTaken returns an error unless the limit's buckets, which were full in the beginning, have lost the admitted tokens.
// Tokens may have arrived since then.
func checkTaken(ctx context.Context, b Bench, limit ratelimit.Limit, keys int, admitted float64, elapsed time.Duration) error {
	gone, err := taken(ctx, b.Database, limit.Name(), limit.Capacity())
	if err != nil {
		return err
	}
	return exact(limit, admitted, gone, float64(keys)*arrived(limit, elapsed))
}

// arrived returns how many tokens arrive in one bucket within elapsed.
func arrived(limit ratelimit.Limit, elapsed time.Duration) float64 {
	policy := limit.Policy().(ratelimit.TokenBucket)
	return policy.Rate * float64(elapsed) / float64(policy.Period)
}

// exact returns an error unless admitted - arrived <= gone <= admitted.
func exact(limit ratelimit.Limit, admitted, gone, arrived float64) error {
	const rounding = 1
	if gone > admitted+rounding || gone < admitted-arrived-rounding {
		return fmt.Errorf("%s: %.0f tokens were admitted and %.0f are gone, while at most %.0f arrived", limit.Name(), admitted, gone, arrived)
	}
	return nil
}
