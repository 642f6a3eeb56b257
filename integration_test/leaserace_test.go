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

// acquirers are the ways to acquire, as callers are those to take.
func acquirers() []caller {
	acquire := func(ctx context.Context, l *ratelimit.Limiter, requests ...ratelimit.Request) (ratelimit.Decision, error) {
		lease, err := l.Acquire(ctx, requests...)
		return lease.Decision, err
	}
	inTx := func(name string, level pgx.TxIsoLevel) caller {
		return caller{name, func(ctx context.Context, pool ratelimit.Pool, l *ratelimit.Limiter, requests ...ratelimit.Request) (d ratelimit.Decision, err error) {
			_, err = atonce.Tx(ctx, pool, level, func(tx pgx.Tx) (err error) {
				d, err = acquire(ctx, l.WithTx(tx), requests...)
				return err
			})
			return d, err
		}}
	}
	return []caller{
		inTx("ReadCommitted", pgx.ReadCommitted),
		inTx("RepeatableRead", pgx.RepeatableRead),
		inTx("Serializable", pgx.Serializable),
		{"Standalone", func(ctx context.Context, _ ratelimit.Pool, l *ratelimit.Limiter, requests ...ratelimit.Request) (ratelimit.Decision, error) {
			return acquire(ctx, l, requests...)
		}},
		{"InTx", func(ctx context.Context, _ ratelimit.Pool, l *ratelimit.Limiter, requests ...ratelimit.Request) (d ratelimit.Decision, err error) {
			err = l.InTx(ctx, func(tx pgx.Tx) (err error) {
				d, err = acquire(ctx, l.WithTx(tx), requests...)
				return err
			})
			return d, err
		}},
	}
}

// daylong returns a limit on concurrency whose leases outlive any test.
func daylong(name string, most int) ratelimit.Limit {
	return ratelimit.Define(name, ratelimit.Concurrency{Most: most, Lease: 24 * time.Hour})
}

func TestAcquireAdmitsExactlyTheSlots(t *testing.T) {
	t.Parallel()
	b := setup(t, func(c *pgxpool.Config) { c.MaxConns = 2 * racers })
	unbatched := b.with(t, ratelimit.Config{NoBatching: true})
	noon := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC) // at which nothing arrives in the buckets beside
	stopped := b.with(t, ratelimit.Config{AsOf: func() time.Time { return noon }})
	for name, limiter := range map[string]*ratelimit.Limiter{"Batched": stopped, "Unbatched": unbatched} {
		for _, c := range acquirers() {
			for _, rowExists := range []bool{true, false} {
				for _, several := range []bool{false, true} {
					name := fmt.Sprintf("%s/%s/RowExists=%v/Several=%v", name, c.name, rowExists, several)
					t.Run(name, func(t *testing.T) {
						t.Parallel()
						if limiter == unbatched {
							testsize.Long(t, "thousands of calls, of which batches are the harder case")
						}
						race{c, limiter, daylong("m-slots", raceCapacity), racersTries, name, rowExists, several, 0}.run(t, b)
					})
				}
			}
		}
	}
}

// Whoever releases and whoever acquires meet on one row, in transactions and without: there are never more holders than
// slots, and in the end all slots are free.
func TestSlotsChangeHandsBetweenManyHolders(t *testing.T) {
	t.Parallel()
	const most, turns = 3, 25
	b := setup(t, func(c *pgxpool.Config) { c.MaxConns = 2 * racers })
	limit := daylong("shared", most)
	for name, config := range map[string]ratelimit.Config{"Batched": {}, "Unbatched": {NoBatching: true}} {
		for _, several := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/Several=%v", name, several), func(t *testing.T) {
				t.Parallel()
				limiter := b.with(t, config)
				requests := []ratelimit.Request{limit.For(t.Name())}
				if several {
					requests = append(requests, daylong("another", most).For(t.Name()))
				}
				var holders atomic.Int64
				require.NoError(t, atonce.Do(racers, func(racer int) error {
					for turn := 0; turn < turns; {
						lease, err := limiter.Acquire(t.Context(), requests...)
						if err != nil {
							return err
						}
						if !lease.Allowed {
							continue
						}
						turn++
						if n := holders.Add(1); n > most {
							return fmt.Errorf("%d holders", n)
						}
						if _, err := limiter.RenewLease(t.Context(), lease.ID); err != nil {
							return err
						}
						holders.Add(-1)
						if racer%2 == 0 {
							err = limiter.Release(t.Context(), lease.ID)
						} else {
							_, err = atonce.Tx(t.Context(), b.db(), pgx.Serializable, func(tx pgx.Tx) error {
								return limiter.WithTx(tx).Release(t.Context(), lease.ID)
							})
						}
						if err != nil {
							return err
						}
					}
					return nil
				}))
				for _, r := range requests {
					v, err := limiter.Value(t.Context(), r)
					require.NoError(t, err)
					require.Equal(t, float64(most), v.Tokens)
				}
			})
		}
	}
}
