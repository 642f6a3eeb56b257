package integration_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Three tenants with guarantees of 50, 30 and 20 a second of a pool of 100 a second.
var (
	lent       = ratelimit.Define("lent", ratelimit.PerSecond(100))
	guarantees = []ratelimit.Limit{
		ratelimit.Define("gold", ratelimit.PerSecond(50)),
		ratelimit.Define("silver", ratelimit.PerSecond(30)),
		ratelimit.Define("bronze", ratelimit.PerSecond(20)),
	}
)

// tenants take one token after the other, in each step of the clock.
type tenants struct {
	*desk
	pool string
	now  time.Duration
}

// run makes the busy tenants take in turns until each is refused, in every step of span. It returns the tokens of each.
func (x *tenants) run(t *testing.T, span time.Duration, busy ...int) (got [3]int) {
	t.Helper()
	step := testsize.Of(20*time.Millisecond, 10*time.Millisecond)
	for end := x.now + span; x.now < end; {
		x.now += step
		x.at(x.now)
		asking := append([]int(nil), busy...)
		for len(asking) > 0 {
			rest := asking[:0]
			for _, tenant := range asking {
				d, err := x.limiter.Take(t.Context(), ratelimit.Borrow(guarantees[tenant].For(x.pool), lent.For(x.pool)))
				require.NoError(t, err)
				if d.Allowed {
					got[tenant]++
					rest = append(rest, tenant)
				}
			}
			asking = rest
		}
	}
	return got
}

// Each busy tenant has its guarantee, and the busy ones together have the tokens that an idle one leaves.
func TestBorrowGuaranteesAndLends(t *testing.T) {
	t.Parallel()
	x := &tenants{desk: inMemory.setup(t).desk(t, ratelimit.Config{}), pool: "one"}
	all := []int{0, 1, 2}
	x.run(t, time.Second, all...) // what the full buckets held is gone
	busy := x.run(t, 2*time.Second, all...)
	require.InDeltaSlice(t, []float64{100, 60, 40}, floats(busy), 1, "each has his guarantee")

	value, err := x.limiter.Value(t.Context(), lent.For(x.pool))
	require.NoError(t, err)
	require.Greater(t, value.Tokens, -100.0, "what the pool owes, because all had full buckets when it was empty")
	idle := x.run(t, 3*time.Second, 1, 2) // gold leaves 50 a second
	t.Logf("all busy for 2 s: %v; gold idle for 3 s: %v", busy, idle)
	require.GreaterOrEqual(t, idle[1], 90, "silver has its guarantee")
	require.GreaterOrEqual(t, idle[2], 60, "bronze has its guarantee")
	require.InDelta(t, 300+value.Tokens, idle[1]+idle[2], 1, "and they have all that gold leaves")

	first := x.run(t, time.Second, all...)
	t.Logf("gold is back, the first second: %v", first)
	require.GreaterOrEqual(t, first[0], 99, "what it saved, and its guarantee of the first second")
	require.GreaterOrEqual(t, first[1], 30)
	require.GreaterOrEqual(t, first[2], 20)

	again := x.run(t, 2*time.Second, all...)
	require.InDeltaSlice(t, []float64{100, 60, 40}, floats(again), 1)
}

func floats(got [3]int) []float64 {
	return []float64{float64(got[0]), float64(got[1]), float64(got[2])}
}
