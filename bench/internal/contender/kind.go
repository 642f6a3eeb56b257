package contender

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Sliding calls Take outside a transaction, on a sliding window that admits every call.
type Sliding struct {
	Keys int
}

// Open creates the buckets with one Take each.
func (w Sliding) Open(ctx context.Context, b Bench) (*Runner, error) {
	return open(b, func(r *Runner) error {
		limiter, err := r.standalone(ctx)
		if err != nil {
			return err
		}
		limit, all := ratelimit.Define(b.Name, ratelimit.SlidingWindow{Rate: roomyCapacity, Period: time.Hour}),
			makeKeys(w.Keys)
		if err := takeEach(ctx, limiter, limit, all); err != nil {
			return err
		}
		r.call = func(ctx context.Context, c *load.Caller) error {
			return allowed(limiter.Take(ctx, limit.For(all.any(c))))
		}
		r.check = func(ctx context.Context, calls int) error {
			const ask = `SELECT coalesce(sum(taken[3]), 0) FROM ratelimit.buckets WHERE name = $1`
			return b.equal(ctx, ask, float64(calls+w.Keys))
		}
		return nil
	})
}

// takeEach takes a token of each key, in batches.
func takeEach(ctx context.Context, l *ratelimit.Limiter, limit ratelimit.Limit, all keys) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(512)
	for i := range all.n {
		g.Go(func() error { return allowed(l.Take(ctx, limit.For(all.at(i)))) })
	}
	return g.Wait()
}

// equal returns an error unless the query returns the number. The name of the limit is its argument.
func (b Bench) equal(ctx context.Context, query string, want float64) error {
	var got float64
	if err := b.Database.Admin().QueryRow(ctx, query, b.Name).Scan(&got); err != nil {
		return err
	}
	if got != want {
		return fmt.Errorf("%s: the rows have %v, the calls %v", b.Name, got, want)
	}
	return nil
}

// Acquire calls Acquire and Release of a slot outside a transaction. One measured call is both.
type Acquire struct {
	Keys int
}

// Open creates the buckets. Each has a slot for every caller.
func (w Acquire) Open(ctx context.Context, b Bench) (*Runner, error) {
	return open(b, func(r *Runner) error {
		limiter, err := r.standalone(ctx)
		if err != nil {
			return err
		}
		limit, all := ratelimit.Define(b.Name, ratelimit.Concurrency{Slots: b.Callers}), makeKeys(w.Keys)
		r.call = func(ctx context.Context, c *load.Caller) error {
			lease, err := limiter.Acquire(ctx, limit.For(all.any(c)))
			if err := allowed(lease.Decision, err); err != nil {
				return err
			}
			return limiter.Release(ctx, lease.ID)
		}
		r.check = func(ctx context.Context, _ int) error {
			return b.equal(ctx, `SELECT count(*)::float8 FROM ratelimit.buckets WHERE name = $1 AND value < capacity`, 0)
		}
		return nil
	})
}
