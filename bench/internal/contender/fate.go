package contender

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/bench/internal/load"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// HeldRows is Take for keys that are free, beside others whose rows a transaction holds and somebody keeps asking for,
// on Limiters of their own as in processes of their own.
type HeldRows struct {
	Unbatched   bool
	Processes   int
	Held        int           // rows
	LockTimeout time.Duration // of the server, for every connection; 0: none
}

// holdFor is how long the rows are held at most, from the beginning of a round.
const holdFor = 6 * time.Second

// stalledAfter is when a call is one that waited for a row it did not ask for.
const stalledAfter = 5 * time.Second

// Open makes the buckets and the Limiters.
func (w HeldRows) Open(ctx context.Context, b Bench) (_ Runner, err error) {
	pool, err := b.Database.Pool(ctx, b.Callers+16, &load.Wire{}, func(c *pgxpool.Config) {
		if w.LockTimeout > 0 {
			c.ConnConfig.RuntimeParams["lock_timeout"] = fmt.Sprint(w.LockTimeout.Milliseconds())
		}
	})
	if err != nil {
		return nil, err
	}
	limit := ratelimit.Define(b.Name, roomy())
	limiters := make([]*ratelimit.Limiter, w.Processes)
	for i := range limiters {
		if limiters[i], err = newLimiter(pool, limiterOptions{unbatched: w.Unbatched}); err != nil {
			pool.Close()
			return nil, err
		}
	}
	if err := fill(ctx, b.Database, limit.Name(), b.Callers+w.Held, roomyCapacity); err != nil {
		pool.Close()
		return nil, err
	}
	all := makeKeys(b.Callers + w.Held)
	key := func(n int) ratelimit.Request { return limit.For(all.text[n*keyBytes : (n+1)*keyBytes]) }
	var stalled, failed atomic.Int64
	r := newRunner(b, func(ctx context.Context, c *load.Caller) error {
		began := time.Now()
		_, err := limiters[c.Number%w.Processes].Take(ctx, key(c.Number))
		if time.Since(began) >= stalledAfter {
			stalled.Add(1)
		}
		if err != nil {
			failed.Add(1)
		}
		return ctx.Err()
	})
	r.before = func(ctx context.Context) (stop func() error, err error) {
		return w.hold(ctx, b, limiters, func(n int) ratelimit.Request { return key(b.Callers + n) })
	}
	r.close = func() error { return closeLimiters(limiters, pool) }
	r.check = func(context.Context, int) error {
		if !w.Unbatched && stalled.Load()+failed.Load() > 0 {
			return fmt.Errorf("%d calls for free keys stalled, and %d failed", stalled.Load(), failed.Load())
		}
		return nil
	}
	return r, nil
}

// hold holds rows until stop is called, or for holdFor, and has each Limiter ask for them meanwhile.
func (w HeldRows) hold(ctx context.Context, b Bench, limiters []*ratelimit.Limiter, key func(int) ratelimit.Request) (stop func() error, err error) {
	tx, err := b.Database.Admin().Begin(ctx)
	if err != nil {
		return nil, err
	}
	asking, cancel := context.WithCancel(ctx)
	var askers sync.WaitGroup
	for n := range w.Held {
		d, err := limiters[0].WithTx(tx).Take(ctx, key(n))
		if err != nil || !d.Allowed {
			cancel()
			return nil, errors.Join(err, d.Err(), tx.Rollback(ctx))
		}
		for _, limiter := range limiters {
			askers.Go(func() {
				for asking.Err() == nil {
					_, err := limiter.Take(asking, key(n))
					var pgErr *pgconn.PgError
					if err != nil && !errors.As(err, &pgErr) {
						return
					}
				}
			})
		}
	}
	var once sync.Once
	release := func() { once.Do(func() { err = tx.Rollback(context.WithoutCancel(ctx)) }) }
	timer := time.AfterFunc(holdFor, release)
	return func() error {
		timer.Stop()
		release()
		cancel()
		askers.Wait()
		return err
	}, nil
}

// Crossing is single calls for one of two keys each, beside READ COMMITTED transactions that take from the second key
// and then from the first, in separate calls.
type Crossing struct {
	Unbatched    bool
	Transactions bool // what is measured: the transactions, or else the calls
}

// crossingCallers is how many goroutines make what is not measured: six callers, or one transaction after the other.
func (w Crossing) crossingCallers() int {
	if w.Transactions {
		return 6
	}
	return 1
}

// Open makes the buckets and the Limiter.
func (w Crossing) Open(ctx context.Context, b Bench) (_ Runner, err error) {
	pool, err := b.Database.Pool(ctx, poolConnections, &load.Wire{})
	if err != nil {
		return nil, err
	}
	limit := ratelimit.Define(b.Name, roomy())
	limiter, err := newLimiter(pool, limiterOptions{unbatched: w.Unbatched})
	if err == nil {
		err = fill(ctx, b.Database, limit.Name(), 2, roomyCapacity)
	}
	if err != nil {
		pool.Close()
		return nil, err
	}
	all := makeKeys(2)
	first, second := limit.For(all.text[:keyBytes]), limit.For(all.text[keyBytes:])
	var deadlocks atomic.Int64
	call := func(ctx context.Context, n int) error {
		d, err := limiter.Take(ctx, []ratelimit.Request{first, second}[n%2])
		return errors.Join(err, d.Err())
	}
	transaction := func(ctx context.Context) error {
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			for _, request := range []ratelimit.Request{second, first} {
				if d, err := limiter.WithTx(tx).Take(ctx, request); err != nil || !d.Allowed {
					return errors.Join(err, d.Err())
				}
			}
			return nil
		})
		if ratelimit.IsRetryable(err) {
			deadlocks.Add(1)
			return nil
		}
		return err
	}
	r := newRunner(b, func(ctx context.Context, c *load.Caller) error {
		if w.Transactions {
			return transaction(ctx)
		}
		return call(ctx, c.Number)
	})
	r.before = func(ctx context.Context) (func() error, error) {
		return background(ctx, w.crossingCallers(), func(ctx context.Context, n int) error {
			if w.Transactions {
				return call(ctx, n)
			}
			return transaction(ctx)
		}), nil
	}
	r.close = func() error { return closeLimiters([]*ratelimit.Limiter{limiter}, pool) }
	r.check = func(context.Context, int) error {
		if !w.Unbatched && deadlocks.Load() > 0 {
			return fmt.Errorf("%d transactions were ended by a deadlock", deadlocks.Load())
		}
		return nil
	}
	return r, nil
}

// background runs work on n goroutines until stop is called.
func background(ctx context.Context, n int, work func(ctx context.Context, n int) error) (stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	failed := make([]error, n)
	var workers sync.WaitGroup
	for i := range n {
		workers.Go(func() {
			for ctx.Err() == nil {
				if err := work(ctx, i); err != nil && ctx.Err() == nil {
					failed[i] = err
					return
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
