package contender

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// HeldRows takes from free keys while a transaction holds the rows of other keys, for which other callers wait. Every Limiter has a pool of
// its own, like a process of its own.
type HeldRows struct {
	Unbatched   bool
	Processes   int
	Held        int           // rows
	LockTimeout time.Duration // sets lock_timeout on every connection; 0: none
}

const (
	holdFor      = 6 * time.Second // the longest hold, from the start of a round
	stalledAfter = 5 * time.Second // a call this slow has waited for another call's row
)

// Open creates the buckets and the Limiters.
func (w HeldRows) Open(ctx context.Context, b Bench) (Runner, error) {
	return open(b, func(r *runner) error {
		pool, err := r.pool(ctx, b.Callers+16, func(c *pgxpool.Config) {
			if w.LockTimeout > 0 {
				c.ConnConfig.RuntimeParams["lock_timeout"] = fmt.Sprint(w.LockTimeout.Milliseconds())
			}
		})
		if err != nil {
			return err
		}
		limiters := make([]*ratelimit.Limiter, w.Processes)
		for i := range limiters {
			if limiters[i], err = r.limiter(pool, ratelimit.Config{NoBatching: w.Unbatched}); err != nil {
				return err
			}
		}
		of, err := fullBuckets(ctx, b, b.Name, b.Callers+w.Held)
		var stalled, failed atomic.Int64
		r.call = func(ctx context.Context, c *load.Caller) error {
			began := time.Now()
			_, err := limiters[c.Number%w.Processes].Take(ctx, of.at(c.Number))
			if time.Since(began) >= stalledAfter {
				stalled.Add(1)
			}
			if err != nil {
				failed.Add(1)
			}
			return ctx.Err()
		}
		r.before = func(ctx context.Context) (stop func() error, err error) {
			return w.hold(ctx, b, limiters, func(n int) ratelimit.Request { return of.at(b.Callers + n) })
		}
		r.check = func(context.Context, int) error {
			if !w.Unbatched && stalled.Load()+failed.Load() > 0 {
				return fmt.Errorf("%d calls for free keys stalled, and %d failed", stalled.Load(), failed.Load())
			}
			return nil
		}
		return err
	})
}

// hold locks rows until stop is called or holdFor has passed. Meanwhile each Limiter takes from them.
func (w HeldRows) hold(ctx context.Context, b Bench, limiters []*ratelimit.Limiter, held func(int) ratelimit.Request) (stop func() error, err error) {
	tx, err := b.Database.Admin().Begin(ctx)
	if err != nil {
		return nil, err
	}
	for n := range w.Held {
		if err := allowed(limiters[0].WithTx(tx).Take(ctx, held(n))); err != nil {
			return nil, errors.Join(err, tx.Rollback(ctx))
		}
	}
	end := background(ctx, w.Held*len(limiters), func(ctx context.Context, n int) error {
		_, _ = limiters[n%len(limiters)].Take(ctx, held(n/len(limiters))) // it may time out
		return nil
	})
	release := sync.OnceValue(func() error { return tx.Rollback(context.WithoutCancel(ctx)) })
	timer := time.AfterFunc(holdFor, func() { _ = release() })
	return func() error {
		timer.Stop()
		return errors.Join(release(), end())
	}, nil
}

// Crossing makes single calls for one of two keys each, beside READ COMMITTED transactions that take from the second key and then from
// the first, in separate calls.
type Crossing struct {
	Unbatched    bool
	Transactions bool // measure the transactions, not the calls
}

// Open creates the buckets and the Limiter.
func (w Crossing) Open(ctx context.Context, b Bench) (Runner, error) {
	return open(b, func(r *runner) error {
		pool, err := r.pool(ctx, poolConnections)
		if err != nil {
			return err
		}
		limiter, err := r.limiter(pool, ratelimit.Config{NoBatching: w.Unbatched})
		if err != nil {
			return err
		}
		of, err := fullBuckets(ctx, b, b.Name, 2)
		var deadlocks atomic.Int64
		call := func(ctx context.Context, n int) error { return allowed(limiter.Take(ctx, of.at(n%2))) }
		transaction := func(ctx context.Context, _ int) error {
			err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				if err := allowed(limiter.WithTx(tx).Take(ctx, of.at(1))); err != nil {
					return err
				}
				return allowed(limiter.WithTx(tx).Take(ctx, of.at(0)))
			})
			if ratelimit.IsRetryable(err) {
				deadlocks.Add(1)
				return nil
			}
			return err
		}
		measured, beside, callersBeside := call, transaction, 1
		if w.Transactions {
			measured, beside, callersBeside = transaction, call, 6
		}
		r.call = func(ctx context.Context, c *load.Caller) error { return measured(ctx, c.Number) }
		r.before = func(ctx context.Context) (func() error, error) { return background(ctx, callersBeside, beside), nil }
		r.check = func(context.Context, int) error {
			if !w.Unbatched && deadlocks.Load() > 0 {
				return fmt.Errorf("%d transactions were ended by a deadlock", deadlocks.Load())
			}
			return nil
		}
		return err
	})
}

// background runs work on n goroutines until stop is called.
func background(ctx context.Context, n int, work func(ctx context.Context, n int) error) (stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	failed := make([]error, n)
	var workers sync.WaitGroup
	for i := range n {
		workers.Go(func() {
			for ctx.Err() == nil && failed[i] == nil {
				if err := work(ctx, i); ctx.Err() == nil {
					failed[i] = err
				}
			}
		})
	}
	return func() error {
		cancel()
		workers.Wait()
		return errors.Join(failed...)
	}
}
