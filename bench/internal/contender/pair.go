package contender

import (
	"context"
	"errors"
	"time"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Pair is the limiter's Take of two limits outside of a transaction: a limit with one bucket for each user, and a global
// limit with one bucket for all users.
type Pair struct {
	Users int // buckets of the limit for each user
}

// globalKey is the key of the global limit's bucket: the first key of makeKeys.
const globalKey = "k0000000"

// Open makes the buckets and a Limiter.
func (w Pair) Open(ctx context.Context, b Bench) (Runner, error) {
	user, global := ratelimit.Define(b.Name+":user", roomy()), ratelimit.Define(b.Name+":global", huge())
	return openLimiter(ctx, b, limiterOptions{}, func(limiter *ratelimit.Limiter, r *runner) error {
		err := errors.Join(
			fill(ctx, b.Database, user.Name(), w.Users, user.Capacity()),
			fill(ctx, b.Database, global.Name(), 1, global.Capacity()),
		)
		if err != nil {
			return err
		}
		users, opened := makeKeys(w.Users), time.Now()
		r.call = func(ctx context.Context, c *load.Caller) error {
			d, err := limiter.Take(ctx, user.For(users.any(c)), global.For(globalKey))
			return allowed(d, err)
		}
		r.check = func(ctx context.Context, calls int) error {
			elapsed := time.Since(opened)
			return errors.Join(
				checkTaken(ctx, b, user, w.Users, float64(calls), elapsed),
				checkTaken(ctx, b, global, 1, float64(calls), elapsed),
			)
		}
		return nil
	})
}
