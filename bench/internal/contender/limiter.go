package contender

import (
	"context"
	"errors"
	"fmt"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Take calls Take outside a transaction.
type Take struct {
	Keys   int  // buckets of each limit
	Limits int  // in one call; 0 is 1
	Global bool // a call also takes from a limit with one bucket
	Config ratelimit.Config
}

// Open creates the buckets and a Limiter.
func (w Take) Open(ctx context.Context, b Bench) (Runner, error) {
	return open(b, func(r *runner) error {
		limiter, err := r.standalone(ctx, w.Config)
		if err != nil {
			return err
		}
		all, err := w.fill(ctx, b)
		if err != nil {
			return err
		}
		r.call = w.call(limiter, all)
		r.check = func(ctx context.Context, calls int) (err error) {
			for _, of := range all {
				err = errors.Join(err, of.check(ctx, float64(calls)))
			}
			return err
		}
		return nil
	})
}

// fill creates the limits and their buckets.
func (w Take) fill(ctx context.Context, b Bench) (all []buckets, err error) {
	sizes := make([]int, max(w.Limits, 1))
	for i := range sizes {
		sizes[i] = w.Keys
	}
	if w.Global {
		sizes = append(sizes, 1)
	}
	for i, n := range sizes {
		of := newBuckets(b, fmt.Sprintf("%s:%d", b.Name, i), n)
		if err := fill(ctx, b, of.limit.Name(), n, of.limit.Capacity(), of.limit.Capacity()); err != nil {
			return nil, err
		}
		all = append(all, of)
	}
	return all, nil
}

// call returns a call of Take as an application makes it.
func (w Take) call(limiter *ratelimit.Limiter, all []buckets) load.Call {
	if len(all) == 1 {
		of := all[0]
		return func(ctx context.Context, c *load.Caller) error { return allowed(limiter.Take(ctx, of.any(c))) }
	}
	return func(ctx context.Context, c *load.Caller) error {
		requests := make([]ratelimit.Request, len(all))
		for i, of := range all {
			requests[i] = of.any(c)
		}
		return allowed(limiter.Take(ctx, requests...))
	}
}

// Reserve calls Reserve on one limit, and then Settle, outside a transaction. One measured call is both.
type Reserve struct {
	Keys int // buckets of the limit
}

// Each reservation takes the estimated cost. Settle returns the tokens beyond the actual cost.
const (
	estimatedCost = 3
	actualCost    = 1
)

// Open makes the buckets and a Limiter. Every bucket holds enough: Reserve neither refuses nor delays.
func (w Reserve) Open(ctx context.Context, b Bench) (Runner, error) {
	return open(b, func(r *runner) error {
		limiter, err := r.standalone(ctx, ratelimit.Config{})
		if err != nil {
			return err
		}
		of, err := fullBuckets(ctx, b, b.Name, w.Keys)
		r.call = func(ctx context.Context, c *load.Caller) error {
			request := of.any(c)
			reservation, err := limiter.Reserve(ctx, request.Cost(estimatedCost))
			if err := allowed(reservation.Decision, err); err != nil {
				return err
			}
			return limiter.Settle(ctx, reservation.ID, request.Cost(actualCost))
		}
		r.check = func(ctx context.Context, calls int) error { return of.check(ctx, actualCost*float64(calls)) }
		return err
	})
}
