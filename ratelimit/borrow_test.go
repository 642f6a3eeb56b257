package ratelimit_test

import (
	"context"
	"fmt"
	"log"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// TestAGuaranteeThatIsNotEnforcedLeavesThePoolToDecide: with the guarantee off or in shadow mode, the pool of five allows five
// takes. If the pool is off or in shadow mode too, all takes are allowed.
func TestAGuaranteeThatIsNotEnforcedLeavesThePoolToDecide(t *testing.T) {
	t.Parallel()
	own, pool := ratelimit.Define("own", ratelimit.PerDay(10)), ratelimit.Define("pool", ratelimit.PerDay(5))
	for ownMode, taken := range map[ratelimit.Mode]float64{ratelimit.Off: 0, ratelimit.Shadow: 5} {
		for _, poolMode := range []ratelimit.Mode{ratelimit.On, ratelimit.Shadow, ratelimit.Off} {
			t.Run(string("own "+ownMode+", pool "+poolMode), func(t *testing.T) {
				t.Parallel()
				policies := make(modes)
				for limit, mode := range map[ratelimit.Limit]ratelimit.Mode{own: ownMode, pool: poolMode} {
					rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Eras: []ratelimit.Era{{Mode: mode}}})
					require.NoError(t, err)
					policies[limit.Name()] = rule
				}
				limiter := newLimiter(t, ratelimittest.NewDB(), ratelimit.Config{Policies: policies, AsOf: func() time.Time { return at }})
				for i := range 7 {
					for _, call := range []func(context.Context, ...ratelimit.Request) (ratelimit.Decision, error){limiter.Check, limiter.Take} {
						d, err := call(t.Context(), ratelimit.Borrow(own.For("ada"), pool.Global()))
						require.NoError(t, err)
						require.Equal(t, poolMode != ratelimit.On || i < 5, d.Allowed, "call %d", i)
						require.Equal(t, ownMode, d.States[0].Mode)
						require.True(t, d.States[0].Allowed, "the guarantee has enough")
					}
				}
				if poolMode == ratelimit.On {
					require.InDelta(t, 0, held(t, limiter, pool.Global()), 1e-9)
					require.InDelta(t, 10-taken, held(t, limiter, own.For("ada")), 1e-9)
				}
			})
		}
	}
}

// A pool of a hundred a second guarantees twenty to a tenant. While other tenants take nothing, he can take all of it.
func ExampleBorrow() {
	simulation, err := ratelimit.NewSimulation(ratelimit.Config{})
	if err != nil {
		log.Fatal(err)
	}
	own := ratelimit.Define("guarantee", ratelimit.PerSecond(20))
	pool := ratelimit.Define("pool", ratelimit.PerSecond(100))
	noon := time.Date(2026, time.March, 1, 12, 0, 0, 0, time.UTC)
	taken, borrowed := 0, 0
	for {
		d, err := simulation.Take(ctx, noon, ratelimit.Borrow(own.For("ada"), pool.Global()))
		if err != nil {
			log.Fatal(err)
		}
		if !d.Allowed {
			fmt.Println(taken, "taken,", borrowed, "of them borrowed; the next", d.RetryAfter)
			break
		}
		taken++
		if d.States[0].Borrowed {
			borrowed++
		}
	}
	d, err := simulation.Take(ctx, noon, ratelimit.Borrow(own.For("bob"), pool.Global()))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("bob comes back:", d.Allowed)
	// Output:
	// 100 taken, 80 of them borrowed; the next 10ms
	// bob comes back: true
}
