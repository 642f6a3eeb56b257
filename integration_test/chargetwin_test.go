package integration_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// A charge and a credit are made by a statement, and by the algebra in Go on locked rows where another bucket of the
// call has several. Both leave the same in a row, to the last bit.
func TestChargesAndCreditsAgreeToTheLastBit(t *testing.T) {
	t.Parallel()
	steps := testsize.Of(80, 400)
	for name, policy := range map[string]ratelimit.Policy{
		"Bucket":  ratelimit.TokenBucket{Rate: 7, Period: 3 * time.Second, Capacity: 100. / 3},
		"Windows": ratelimit.FixedWindow{Rate: 0.7, Period: 11 * time.Second, Capacity: 100. / 3, Start: clockNoon},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			random := testsize.Rand(t)
			d := setup(t).desk(t, ratelimit.Config{})
			limit := ratelimit.Define("twin", policy)
			beside := ratelimit.Define("beside", ratelimit.TokenBucket{Rate: 1, Period: time.Second, Shards: 2}).For("key")
			for range steps {
				span := time.Duration(random.ExpFloat64() * float64(5*time.Second)).Truncate(time.Microsecond)
				if random.IntN(20) == 0 {
					span = -20 * span // by which a clock was wrong
				}
				d.clock.set(d.clock.now().Add(span))
				call := func(ctx context.Context, requests ...ratelimit.Request) error {
					return d.limiter.Credit(ctx, requests...)
				}
				switch taken := d.clock.now().Add(-5 * time.Second); random.IntN(3) {
				case 0:
					call = func(ctx context.Context, requests ...ratelimit.Request) error {
						return d.limiter.Charge(ctx, requests...)
					}
				case 1:
					call = func(ctx context.Context, requests ...ratelimit.Request) error {
						return d.limiter.CreditTaken(ctx, taken, requests...)
					}
				}
				if random.IntN(40) == 0 {
					d.exec(t, "DELETE FROM ratelimit.buckets")
				}
				cost := 0.01 + 20*random.Float64()
				require.NoError(t, call(t.Context(), limit.For("by statement").Cost(cost)))
				require.NoError(t, call(t.Context(), limit.For("in Go").Cost(cost), beside))
				if len(d.rows(t, "by statement")) == 0 {
					d.exec(t, "DELETE FROM ratelimit.buckets") // a credit of a window that is over made none, or a full one
					continue
				}
				want, got := d.row(t, "twin", "by statement"), d.row(t, "twin", "in Go")
				require.Equal(t, want.Bits, got.Bits, "%v and %v", want, got)
				require.Equal(t, want.TS, got.TS)
			}
		})
	}
}
