package integration_test

import (
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

// daylong returns a limit on concurrency whose leases outlive any test.
func daylong(name string, most int) ratelimit.Limit {
	return ratelimit.Define(name, ratelimit.Concurrency{Most: most, Lease: 24 * time.Hour})
}

// Whoever releases and whoever acquires meet on one row, in transactions and without: there are never more holders than
// slots, and in the end all slots are free.
func TestSlotsChangeHandsBetweenManyHolders(t *testing.T) {
	t.Parallel()
	most, turns := 3, testsize.Of(4, 25)
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
						if n := holders.Add(1); n > int64(most) {
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
