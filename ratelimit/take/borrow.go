package take

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Borrow takes tokens from own, a guarantee, or otherwise from pool, which holds the unused share of all guarantees.
// For example, a pool of 100 a second serves tenants with guarantees of 50, 30 and 20. Each tenant can use its
// guarantee at any time, and all tenants share the rest.
//
//	d, err := take.Borrow(ctx, limiter, 1, Guarantee.For(tenant), Pool.Global())
//
// If own has enough tokens, they are taken from own, and also charged to the pool, even below zero. Otherwise, if the
// pool has enough, they are taken from the pool alone. Otherwise nothing is taken, and the decision is a refusal with
// the shorter of the two waits. So a tenant that returns is served from its guarantee immediately, and borrowers wait
// for the pool.
//
// If the guarantees add up to at most the pool's rate, all tenants together take at most that rate times t in any span
// t, plus the capacities of the pool and the guarantees.
//
// The two requests' costs don't matter. The decision has own's state and, if the pool was asked too, the pool's after
// it, so the last state is of the limit that paid. More tokens than own's capacity can only come from the pool, and the
// decision then has only the pool's state.
//
// Outside a transaction Borrow runs in one of InTx, and returns its errors too. On a Limiter of WithTx it's part of
// that transaction; roll back if Borrow returns an error. It locks own's row before the pool's, so don't name both in
// one other call, which may lock them in another order.
//
// A limit in shadow or off refuses nothing; if that is own, the pool decides alone. A pause of own refuses, and a pause
// of the pool stops only borrowers. The pool must be able to owe tokens, so Borrow returns ErrInvalidRequest for a
// SlidingWindow or a Concurrency, and if both requests name one bucket.
func Borrow(
	ctx context.Context, l *ratelimit.Limiter, tokens float64, own, pool ratelimit.Request,
) (d ratelimit.Decision, err error) {
	own, pool = own.Cost(tokens), pool.Cost(tokens)
	if l == nil || ctx == nil {
		return l.Take(ctx, own, pool) // which returns the error
	}
	if err := checkPool(l, tokens, own, pool); err != nil {
		return d, err
	}
	switch {
	case l.Mode(own) != ratelimit.On:
		return l.Take(ctx, own, pool)
	case l.InTransaction():
		return borrow(ctx, l, own, pool)
	}
	// A snapshot that is older than the last charge of a busy pool would have to run again.
	err = l.InTx(ratelimit.WithQueue(ctx, pool), func(tx pgx.Tx) error {
		d, err = borrow(ctx, l.WithTx(tx), own, pool)
		return err
	})
	if err != nil {
		return ratelimit.Decision{}, err
	}
	return d, nil
}

// checkPool returns an error if own cannot borrow from pool, before own pays.
func checkPool(l *ratelimit.Limiter, tokens float64, own, pool ratelimit.Request) error {
	limit := l.Resolve(pool)
	kind, name := limit.Spec().Kind, pool.Limit().Name()
	_, costErr := limit.Global().FullValue(time.Time{}).RetryAfter(time.Time{}, tokens)
	key, keyErr := l.StoredKey(pool)
	ownKey, ownErr := l.StoredKey(own)
	switch {
	case costErr != nil && !errors.Is(costErr, ratelimit.ErrCostExceedsCapacity): // else own may have a larger capacity
		return costErr
	case keyErr != nil:
		return keyErr
	case kind == ratelimit.KindSlidingWindow, kind == ratelimit.KindConcurrency:
		return fmt.Errorf("%w: borrow from %q, which is %v and owes no tokens; "+
			"use a token bucket or a window as the pool", ratelimit.ErrInvalidRequest, name, limit.Policy())
	case ownErr == nil && own.Limit().Name() == name && ownKey == key:
		return fmt.Errorf("%w: %q would borrow from itself; name another limit or key as the pool",
			ratelimit.ErrInvalidRequest, name)
	}
	return nil
}

// borrow is Borrow in the transaction of l.
func borrow(ctx context.Context, l *ratelimit.Limiter, own, pool ratelimit.Request) (ratelimit.Decision, error) {
	guaranteed, err := l.Take(ctx, own)
	switch {
	case errors.Is(err, ratelimit.ErrCostExceedsCapacity):
		return l.Take(ctx, pool)
	case err != nil:
		return ratelimit.Decision{}, err
	case guaranteed.Allowed:
		if err := l.Charge(ctx, pool); err != nil {
			return ratelimit.Decision{}, err
		}
		return guaranteed, nil
	case !guaranteed.States[0].PausedUntil.IsZero():
		return guaranteed, nil
	}
	d, err := l.Take(ctx, pool)
	if errors.Is(err, ratelimit.ErrCostExceedsCapacity) { // own gives it later
		return guaranteed, nil
	}
	if err != nil {
		return ratelimit.Decision{}, err
	}
	if !d.Allowed {
		d.RetryAfter = min(d.RetryAfter, guaranteed.RetryAfter)
	}
	d.Remaining, d.ResetAfter = min(d.Remaining, guaranteed.Remaining), max(d.ResetAfter, guaranteed.ResetAfter)
	d.States = append(guaranteed.States, d.States...)
	return d, nil
}
