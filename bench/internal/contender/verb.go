package contender

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Verb makes calls of the Limiter outside a transaction, on full buckets of one or more limits.
type Verb struct {
	Keys   int     // buckets of each limit
	Limits int     // in one call; 0 is 1
	Net    float64 // tokens of each limit that a call takes in the end
	// Do makes one call, with a request for a token of a random bucket of each limit.
	Do func(ctx context.Context, l *ratelimit.Limiter, requests []ratelimit.Request) error
}

// Open creates the buckets and a Limiter.
func (w Verb) Open(ctx context.Context, b Bench) (*Runner, error) {
	return open(b, func(r *Runner) error {
		limiter, err := r.standalone(ctx)
		if err != nil {
			return err
		}
		all, err := Take{Keys: w.Keys, Limits: w.Limits}.fill(ctx, b)
		r.call = func(ctx context.Context, c *load.Caller) error {
			requests := make([]ratelimit.Request, len(all))
			for i, of := range all {
				requests[i] = of.any(c)
			}
			return w.Do(ctx, limiter, requests)
		}
		r.check = func(ctx context.Context, calls int) (err error) {
			for _, of := range all {
				err = errors.Join(err, of.check(ctx, w.Net*float64(calls)))
			}
			return err
		}
		return err
	})
}

// CheckOnly looks, and takes nothing.
func CheckOnly(ctx context.Context, l *ratelimit.Limiter, requests []ratelimit.Request) error {
	return allowed(l.Check(ctx, requests...))
}

// ReserveAndSettle reserves 3 tokens of each limit, and settles at 1.
func ReserveAndSettle(ctx context.Context, l *ratelimit.Limiter, requests []ratelimit.Request) error {
	return reserveAnd(ctx, l, requests, func(id string, actual []ratelimit.Request) error {
		return l.Settle(ctx, id, actual...)
	})
}

// ReserveAndCancel reserves 3 tokens of each limit, and gives them back.
func ReserveAndCancel(ctx context.Context, l *ratelimit.Limiter, requests []ratelimit.Request) error {
	return reserveAnd(ctx, l, requests, func(id string, _ []ratelimit.Request) error { return l.Cancel(ctx, id) })
}

// reserveAnd reserves 3 tokens of each limit, and then ends the reservation.
func reserveAnd(ctx context.Context, l *ratelimit.Limiter, requests []ratelimit.Request,
	end func(id string, actual []ratelimit.Request) error,
) error {
	estimated := make([]ratelimit.Request, len(requests))
	for i := range requests {
		estimated[i] = requests[i].Cost(3)
	}
	reservation, err := l.Reserve(ctx, estimated...)
	if err := allowed(reservation.Decision, err); err != nil {
		return err
	}
	return end(reservation.ID, requests)
}

// ChargeAndCredit charges a token, and gives it back.
func ChargeAndCredit(ctx context.Context, l *ratelimit.Limiter, requests []ratelimit.Request) error {
	if err := l.Charge(ctx, requests...); err != nil {
		return err
	}
	return l.Credit(ctx, requests...)
}

// Reset fills the bucket.
func Reset(ctx context.Context, l *ratelimit.Limiter, requests []ratelimit.Request) error {
	return l.Reset(ctx, requests...)
}

// Renewal calls RenewLease outside a transaction. Each caller holds a lease of its own.
type Renewal struct{}

// Open takes a lease for each caller.
func (w Renewal) Open(ctx context.Context, b Bench) (*Runner, error) {
	return open(b, func(r *Runner) error {
		limiter, err := r.standalone(ctx)
		if err != nil {
			return err
		}
		limit, ids := ratelimit.Define(b.Name, ratelimit.Concurrency{Slots: 1, Lease: time.Hour}), make(chan string, b.Callers)
		for i := range b.Callers {
			lease, err := limiter.Acquire(ctx, limit.For(fmt.Sprint(i)))
			if err := allowed(lease.Decision, err); err != nil {
				return err
			}
			ids <- lease.ID
		}
		r.call = func(ctx context.Context, _ *load.Caller) error {
			id := <-ids
			defer func() { ids <- id }()
			_, err := limiter.RenewLease(ctx, id)
			return err
		}
		r.check = func(ctx context.Context, _ int) error {
			return b.equal(ctx, `SELECT count(*)::float8 FROM ratelimit.leases WHERE name = $1`, float64(b.Callers))
		}
		return nil
	})
}
