package contender

import (
	"context"
	"time"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Reserve is the limiter's Reserve of one limit and the Settle of that reservation, both outside of a transaction. A call
// is both of them.
type Reserve struct {
	Keys int // buckets of the limit
}

// Each reservation takes the estimated cost. Settle gives back what exceeds the actual cost.
const (
	estimatedCost = 3
	actualCost    = 1
)

// Open makes the buckets and a Limiter. The limit sets no MaxReserved, and every bucket holds enough: Reserve never
// refuses and never delays.
func (w Reserve) Open(ctx context.Context, b Bench) (Runner, error) {
	limit := ratelimit.Define(b.Name, roomy())
	return openLimiter(ctx, b, limiterOptions{}, func(limiter *ratelimit.Limiter, r *runner) error {
		if err := fill(ctx, b.Database, limit.Name(), w.Keys, limit.Capacity()); err != nil {
			return err
		}
		all, opened := makeKeys(w.Keys), time.Now()
		r.call = func(ctx context.Context, c *load.Caller) error {
			request := limit.For(all.any(c))
			reservation, err := limiter.Reserve(ctx, request.Cost(estimatedCost))
			if err := allowed(reservation.Decision, err); err != nil {
				return err
			}
			return limiter.Settle(ctx, reservation.ID, request.Cost(actualCost))
		}
		r.check = func(ctx context.Context, calls int) error {
			return checkTaken(ctx, b, limit, w.Keys, actualCost*float64(calls), time.Since(opened))
		}
		return nil
	})
}
