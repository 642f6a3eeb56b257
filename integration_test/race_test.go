package integration_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// caller is a way to take: from which transaction, at which isolation level.
type caller struct {
	name string
	take func(ctx context.Context, pool ratelimit.Pool, limiter *ratelimit.Limiter, requests ...ratelimit.Request) (ratelimit.Decision, error)
}

func callers() []caller {
	return []caller{
		inCallersTx("ReadCommitted", pgx.ReadCommitted),
		inCallersTx("RepeatableRead", pgx.RepeatableRead),
		inCallersTx("Serializable", pgx.Serializable),
		{"Standalone", func(ctx context.Context, _ ratelimit.Pool, limiter *ratelimit.Limiter, requests ...ratelimit.Request) (ratelimit.Decision, error) {
			return limiter.Take(ctx, requests...)
		}},
		{"InTx", func(ctx context.Context, _ ratelimit.Pool, limiter *ratelimit.Limiter, requests ...ratelimit.Request) (d ratelimit.Decision, err error) {
			err = limiter.InTx(ctx, func(tx pgx.Tx) (err error) {
				d, err = limiter.WithTx(tx).Take(ctx, requests...)
				return err
			})
			return d, err
		}},
	}
}

// inCallersTx takes in a transaction that also commits refusals: they must have cost nothing.
func inCallersTx(name string, level pgx.TxIsoLevel) caller {
	return caller{name, func(ctx context.Context, pool ratelimit.Pool, limiter *ratelimit.Limiter, requests ...ratelimit.Request) (d ratelimit.Decision, err error) {
		_, err = atonce.Tx(ctx, pool, level, func(tx pgx.Tx) (err error) {
			d, err = limiter.WithTx(tx).Take(ctx, requests...)
			return err
		})
		return d, err
	}}
}

const (
	racers       = 8
	racersTries  = 25
	raceCapacity = 50
)

// race is one key with room for fewer than the racers * tries tokens asked for at once.
type race struct {
	caller    caller
	limiter   *ratelimit.Limiter
	hot       ratelimit.Limit
	tries     int    // of each racer
	key       string // of the hot limit, and the start of the racers' own keys
	rowExists bool
	several   bool    // between two limits of each racer's own that could give all it asks
	leftover  float64 // what may have arrived meanwhile
}

func (r race) run(t *testing.T, b *bundle) {
	t.Helper()
	if r.rowExists {
		require.NoError(t, r.limiter.Reset(t.Context(), r.hot.For(r.key)))
	}
	before := ratelimit.Define("a-"+r.hot.Name(), hoard(float64(r.tries)))
	after := ratelimit.Define("z-"+r.hot.Name(), hoard(float64(r.tries)))
	var admitted atomic.Int64
	won := make([]int, racers)
	require.NoError(t, atonce.Do(racers, func(racer int) error {
		requests := []ratelimit.Request{r.hot.For(r.key)}
		if r.several {
			own := fmt.Sprintf("%s %d", r.key, racer)
			requests = []ratelimit.Request{after.For(own), r.hot.For(r.key), before.For(own)}
		}
		for range r.tries {
			d, err := r.caller.take(t.Context(), b.db(), r.limiter, requests...)
			if err != nil {
				return err
			}
			if d.Allowed {
				admitted.Add(1)
				won[racer]++
			}
		}
		return nil
	}))
	require.EqualValues(t, r.hot.Capacity(), admitted.Load())
	held := b.held(t, r.hot.Name(), r.key)
	require.GreaterOrEqual(t, held, 0.0)
	require.LessOrEqual(t, held, r.leftover)
	if !r.several {
		return
	}
	for racer, tokens := range won { // what was refused took nothing from the racer's own limits either
		for _, own := range []ratelimit.Limit{before, after} {
			v, err := r.limiter.Value(t.Context(), own.For(fmt.Sprintf("%s %d", r.key, racer)))
			require.NoError(t, err)
			require.InDelta(t, r.tries-tokens, v.Tokens, 1e-3)
		}
	}
}

func TestTakeAdmitsExactlyTheCapacity(t *testing.T) {
	t.Parallel()
	b := setup(t, func(c *pgxpool.Config) { c.MaxConns = 2 * racers })
	noon := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	stopped := b.with(t, ratelimit.Config{AsOf: func() time.Time { return noon }})
	unbatched := b.with(t, ratelimit.Config{AsOf: func() time.Time { return noon }, NoBatching: true})
	policies := []struct {
		name    string
		limiter *ratelimit.Limiter // on which nothing arrives during the race
		hot     ratelimit.Limit
	}{
		{"TokenBucket", stopped, ratelimit.Define("bucket", hoard(raceCapacity))},
		{"Unbatched", unbatched, ratelimit.Define("bucket", hoard(raceCapacity))},
		{"SlidingWindow", stopped, ratelimit.Define("sliding", ratelimit.SlidingWindow{Rate: raceCapacity, Period: time.Hour})},
		{"SlidingWindowOfNow", b.limiter, ratelimit.Define("slidingNow", ratelimit.SlidingWindow{Rate: raceCapacity, Period: ratelimit.Day})},
		{"FixedWindow", b.limiter, ratelimit.Define("window", ratelimit.FixedWindow{Rate: raceCapacity, Period: century, Start: noon})},
	}
	for _, policy := range policies {
		for _, c := range callers() {
			for _, rowExists := range []bool{true, false} {
				for _, several := range []bool{false, true} {
					name := fmt.Sprintf("%s/%s/RowExists=%v/Several=%v", policy.name, c.name, rowExists, several)
					t.Run(name, func(t *testing.T) {
						t.Parallel()
						if policy.limiter == unbatched {
							testsize.Long(t, "thousands of takes, of which batches are the harder case")
						}
						race{c, policy.limiter, policy.hot, racersTries, name, rowExists, several, 0}.run(t, b)
					})
				}
			}
		}
	}
}

// The first use of a key has no row to lock, so two first users meet at the insert.
func TestTakeHasOneFirstUser(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "ten thousand takes; TestTakeAdmitsExactlyTheCapacity has first users too")
	const users, keys = 24, 40
	b := setup(t, func(c *pgxpool.Config) { c.MaxConns = users })
	first := ratelimit.Define("first", hoard(1))
	second := ratelimit.Define("second", hoard(1))
	for _, c := range callers() {
		for _, several := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/Several=%v", c.name, several), func(t *testing.T) {
				t.Parallel()
				var winners [keys]atomic.Int64
				require.NoError(t, atonce.Do(users, func(int) error {
					for i := range keys {
						key := fmt.Sprintf("%s %d", t.Name(), i)
						requests := []ratelimit.Request{first.For(key)}
						if several {
							requests = append(requests, second.For(key))
						}
						d, err := c.take(t.Context(), b.db(), b.limiter, requests...)
						if err != nil {
							return err
						}
						if d.Allowed {
							winners[i].Add(1)
						}
					}
					return nil
				}))
				for i := range keys {
					require.EqualValues(t, 1, winners[i].Load(), "key %d", i)
				}
			})
		}
	}
}
