package integration_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// caller makes a call in one place: without a transaction, in a transaction of the caller at an isolation level, or in Limiter.InTx.
type caller struct {
	name   string
	within func(ctx context.Context, pool ratelimit.Pool, limiter *ratelimit.Limiter, call func(l *ratelimit.Limiter) error) error
	decide func(ctx context.Context, l *ratelimit.Limiter, requests ...ratelimit.Request) (ratelimit.Decision, error)
}

// take makes the caller's call: Take, or Acquire for acquirers.
func (c caller) take(ctx context.Context, pool ratelimit.Pool, limiter *ratelimit.Limiter, requests ...ratelimit.Request) (d ratelimit.Decision, err error) {
	err = c.within(ctx, pool, limiter, func(l *ratelimit.Limiter) (err error) {
		d, err = c.decide(ctx, l, requests...)
		return err
	})
	return d, err
}

// takesUpTo makes a TakeUpTo in place of the caller's call.
func (c caller) takesUpTo(ctx context.Context, pool ratelimit.Pool, limiter *ratelimit.Limiter, n int, requests ...ratelimit.Request) (taken int, d ratelimit.Decision, err error) {
	err = c.within(ctx, pool, limiter, func(l *ratelimit.Limiter) (err error) {
		taken, d, err = l.TakeUpTo(ctx, n, requests...)
		return err
	})
	return taken, d, err
}

// callers returns a caller of Take for each place.
func callers() []caller {
	return callersOf(func(ctx context.Context, l *ratelimit.Limiter, requests ...ratelimit.Request) (ratelimit.Decision, error) {
		return l.Take(ctx, requests...)
	})
}

// acquirers returns a caller of Acquire for each place.
func acquirers() []caller {
	return callersOf(func(ctx context.Context, l *ratelimit.Limiter, requests ...ratelimit.Request) (ratelimit.Decision, error) {
		lease, err := l.Acquire(ctx, requests...)
		return lease.Decision, err
	})
}

func callersOf(decide func(ctx context.Context, l *ratelimit.Limiter, requests ...ratelimit.Request) (ratelimit.Decision, error)) []caller {
	return []caller{
		{"ReadCommitted", inCallersTx(pgx.ReadCommitted), decide},
		{"RepeatableRead", inCallersTx(pgx.RepeatableRead), decide},
		{"Serializable", inCallersTx(pgx.Serializable), decide},
		{"Standalone", func(_ context.Context, _ ratelimit.Pool, limiter *ratelimit.Limiter, call func(l *ratelimit.Limiter) error) error {
			return call(limiter)
		}, decide},
		{"InTx", func(ctx context.Context, _ ratelimit.Pool, limiter *ratelimit.Limiter, call func(l *ratelimit.Limiter) error) error {
			return limiter.InTx(ctx, func(tx pgx.Tx) error { return call(limiter.WithTx(tx)) })
		}, decide},
	}
}

// inCallersTx makes the call in a transaction that commits even if the call is refused: a refused call must have taken nothing.
func inCallersTx(level pgx.TxIsoLevel) func(context.Context, ratelimit.Pool, *ratelimit.Limiter, func(*ratelimit.Limiter) error) error {
	return func(ctx context.Context, pool ratelimit.Pool, limiter *ratelimit.Limiter, call func(*ratelimit.Limiter) error) error {
		_, err := atonce.Tx(ctx, pool, level, func(tx pgx.Tx) error { return call(limiter.WithTx(tx)) })
		return err
	}
}

const (
	racers       = 8
	racersTries  = 10
	raceCapacity = 50
)

// race is a test in which racers concurrently request more units of a hot limit than it has.
type race struct {
	limiter *ratelimit.Limiter
	call    func(ctx context.Context, requests ...ratelimit.Request) (units int, err error) // returns the units it was given
	hot     func(key string) ratelimit.Request
	keys    []string
	tries   int  // of each racer on each key
	several bool // whether each call also takes from two limits of its racer, which have enough
}

// run returns the units that the racers were given of each key. It checks that a call refused by the hot limit took nothing from the
// racer's own limits.
func (r race) run(t *testing.T) (given []int64) {
	t.Helper()
	const enough = 200
	before, after := ratelimit.Define("a-own", hoard(enough)), ratelimit.Define("z-own", hoard(enough))
	own := func(racer int) string { return fmt.Sprint(r.hot(r.keys[0]).Limit().Name(), r.keys[0], racer) }
	sums := make([]atomic.Int64, len(r.keys))
	won := make([]int, racers)
	require.NoError(t, atonce.Do(racers, func(racer int) error {
		for i, key := range r.keys {
			requests := []ratelimit.Request{r.hot(key)}
			if r.several {
				requests = []ratelimit.Request{after.For(own(racer)), r.hot(key), before.For(own(racer))}
			}
			for range r.tries {
				units, err := r.call(t.Context(), requests...)
				if err != nil {
					return err
				}
				sums[i].Add(int64(units))
				won[racer] += units
			}
		}
		return nil
	}))
	for racer, units := range won {
		for _, limit := range []ratelimit.Limit{before, after} {
			if !r.several {
				break
			}
			v, err := r.limiter.Value(t.Context(), limit.For(own(racer)))
			require.NoError(t, err)
			require.InDelta(t, enough-units, v.Tokens, 1e-3)
		}
	}
	for i := range sums {
		given = append(given, sums[i].Load())
	}
	return given
}

// race checks that concurrent callers are given exactly the capacity of a limit.
func (b *bundle) race(t *testing.T, c caller, hot ratelimit.Limit, tries int, key string, several bool) {
	t.Helper()
	given := race{
		limiter: b.limiter, hot: hot.For, keys: []string{key}, tries: tries, several: several,
		call: func(ctx context.Context, requests ...ratelimit.Request) (units int, err error) {
			d, err := c.take(ctx, b.db(), b.limiter, requests...)
			if d.Allowed {
				units = 1
			}
			return units, err
		},
	}.run(t)
	require.Equal(t, []int64{int64(hot.Capacity())}, given)
	require.InDelta(t, 0, b.held(t, hot.Name(), key), 1e-3) // tokens that arrive meanwhile
	require.GreaterOrEqual(t, b.held(t, hot.Name(), key), 0.0)
}
