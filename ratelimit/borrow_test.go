package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

var (
	guarantee = ratelimit.Define("guarantee", ratelimit.PerSecond(20))
	shared    = ratelimit.Define("shared", ratelimit.PerSecond(100))
)

// TestInvalidBorrows are refused before any SQL, with what to do instead.
func TestInvalidBorrows(t *testing.T) {
	t.Parallel()
	borrow := ratelimit.Borrow(guarantee.For(secret), shared.Global())
	sliding := ratelimit.Define("sliding", ratelimit.SlidingWindow{Rate: 5, Period: time.Minute})
	slots := ratelimit.Define("slots", ratelimit.Concurrency{Most: 5})
	type requests = []ratelimit.Request
	many := slices.Repeat(requests{borrow}, 33)
	requireInvalid(t, []invalid{
		{"Reserved", "Reserve", requests{borrow}, ratelimit.ErrInvalidRequest, `reserve of a Borrow, which is for Take, Check and TakeUpTo: name "guarantee", or the pool "shared", by itself`},
		{"ReserveChecked", "CheckReserve", requests{borrow}, ratelimit.ErrInvalidRequest, "by itself"},
		{"Reset", "Reset", requests{borrow}, ratelimit.ErrInvalidRequest, "by itself"},
		{"Value", "Value", requests{borrow}, ratelimit.ErrInvalidRequest, "by itself"},
		{"PoolOfAPool", "Take", requests{ratelimit.Borrow(guarantee.For(secret), borrow)}, ratelimit.ErrInvalidRequest, "pass the request of one guarantee and that of one pool"},
		{"OwnOfAPool", "Take", requests{ratelimit.Borrow(borrow, shared.For("b"))}, ratelimit.ErrInvalidRequest, "pass the request of one guarantee and that of one pool"},
		{"FromItself", "Take", requests{ratelimit.Borrow(shared.Global(), shared.Global())}, ratelimit.ErrInvalidRequest, `"shared" is to borrow from itself`},
		{"FromTwoPools", "Take", requests{borrow, ratelimit.Borrow(guarantee.For(secret), shared.For("b"))}, ratelimit.ErrInvalidRequest, "from two pools in one call"},
		{"AskedOtherwise", "Check", requests{borrow, guarantee.For(secret)}, ratelimit.ErrInvalidRequest, "borrows and is asked otherwise"},
		{"LentOn", "Take", requests{borrow, ratelimit.Borrow(guarantee.For("b"), guarantee.For(secret))}, ratelimit.ErrInvalidRequest, "borrows and is asked otherwise"},
		{"ZeroPool", "Take", requests{ratelimit.Borrow(guarantee.For(secret), ratelimit.Request{})}, ratelimit.ErrInvalidLimit, "make limits with Define"},
		{"ZeroOwn", "Take", requests{ratelimit.Borrow(ratelimit.Request{}, shared.Global())}, ratelimit.ErrInvalidLimit, "make limits with Define"},
		{"NoKeyOfThePool", "Take", requests{ratelimit.Borrow(guarantee.For(secret), shared.For(""))}, ratelimit.ErrInvalidKey, `"shared"`},
		{"SlidingPool", "Take", requests{ratelimit.Borrow(guarantee.For(secret), sliding.Global())}, ratelimit.ErrInvalidRequest, "use token buckets, fixed windows or calendar windows"},
		{"SlidingOwn", "TakeUpTo", requests{ratelimit.Borrow(sliding.For(secret), shared.Global())}, ratelimit.ErrInvalidRequest, "use token buckets, fixed windows or calendar windows"},
		{"Slots", "Take", requests{ratelimit.Borrow(guarantee.For(secret), slots.Global())}, ratelimit.ErrInvalidRequest, `"slots"`},
		{"BeyondBoth", "Take", requests{borrow.Cost(101)}, ratelimit.ErrCostExceedsCapacity, `nor can its pool "shared"`},
		{"BeyondBothTogether", "Take", requests{borrow.Cost(60), ratelimit.Borrow(guarantee.For("b"), shared.Global()).Cost(60)}, ratelimit.ErrCostExceedsCapacity, "nor can its pool"},
		{"TooSmallBesideThePool", "Take", requests{ratelimit.Borrow(guarantee.For(secret), ratelimit.Define("huge", ratelimit.PerSecond(1e12)).Global()).Cost(0.1)}, ratelimit.ErrInvalidCost, `"huge"`},
		{"Negative", "Take", requests{borrow.Cost(-1)}, ratelimit.ErrInvalidCost, "from 0 up"},
		{"TooMany", "Take", many, ratelimit.ErrInvalidRequest, "asks for 66 limits, of which a Borrow has two"},
	})
	limiter, err := ratelimit.New(untouched{t: t}, ratelimit.Config{})
	require.NoError(t, err)
	for name, err := range map[string]error{
		"Charge": limiter.Charge(t.Context(), borrow), "Credit": limiter.Credit(t.Context(), borrow),
		"CreditTaken": limiter.CreditTaken(t.Context(), opening, borrow), "Wait": waitFor(t.Context(), limiter, borrow),
		"Settle": limiter.Settle(t.Context(), "00000000-0000-4000-8000-000000000000", borrow),
	} {
		require.ErrorIs(t, err, ratelimit.ErrInvalidRequest, name)
		require.ErrorContains(t, err, "by itself", name)
	}
}

func waitFor(ctx context.Context, limiter *ratelimit.Limiter, requests ...ratelimit.Request) error {
	_, err := limiter.Wait(ctx, requests...)
	return err
}

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

// TestBorrowIsTheSameInASimulation compares a Simulation with a Limiter on Postgres, for the same calls. They have bursts, sharded
// limits, clocks that step back, and rules with limits in shadow mode, off, or changing.
func TestBorrowIsTheSameInASimulation(t *testing.T) {
	t.Parallel()
	start := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	own := []ratelimit.Limit{
		ratelimit.Define("tokens", ratelimit.TokenBucket{Rate: 3, Period: time.Second, Capacity: 4}),
		ratelimit.Define("windows", ratelimit.FixedWindow{Rate: 4, Period: 2 * time.Second}),
		ratelimit.Define("rows", ratelimit.TokenBucket{Rate: 2, Period: time.Second, Capacity: 8, Shards: 4}),
	}
	pools := []ratelimit.Limit{
		ratelimit.Define("pool", ratelimit.TokenBucket{Rate: 8, Period: time.Second}),
		ratelimit.Define("poolOfRows", ratelimit.TokenBucket{Rate: 8, Period: time.Second, Shards: 2}),
	}
	for name, modesOf := range map[string]map[string]ratelimit.Mode{
		"plain": {}, "the pool in shadow": {"pool": ratelimit.Shadow}, "the pool off": {"pool": ratelimit.Off},
		"a guarantee in shadow": {"tokens": ratelimit.Shadow}, "guarantees off": {"tokens": ratelimit.Off, "rows": ratelimit.Off},
		"both in shadow": {"tokens": ratelimit.Shadow, "pool": ratelimit.Shadow}, "both off": {"windows": ratelimit.Off, "pool": ratelimit.Off},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if name != "plain" && name != "guarantees off" {
				testsize.Long(t, "makes 800 calls, as the other modes do")
			}
			policies := make(modes)
			for _, limit := range slices.Concat(own, pools) {
				mode, ruled := modesOf[limit.Name()]
				eras := []ratelimit.Era{{Mode: mode}}
				if ruled || limit.Name() == "poolOfRows" {
					if limit.Name() == "poolOfRows" {
						eras = append(eras, ratelimit.Era{From: start.Add(10 * time.Second), Policy: ratelimit.TokenBucket{Rate: 12, Period: time.Second, Shards: 2}, OnChange: ratelimit.AddTokens})
					}
					rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Name: "rule", Eras: eras})
					require.NoError(t, err)
					policies[limit.Name()] = rule
				}
			}
			now := start
			config := ratelimit.Config{Policies: policies, AsOf: func() time.Time { return now }, RefusalCache: 64}
			limiter, err := ratelimit.New(postgrestest.New(t), config)
			require.NoError(t, err)
			simulation, err := ratelimit.NewSimulation(ratelimit.Config{Policies: policies})
			require.NoError(t, err)
			random, borrowed, refused := rand.New(rand.NewPCG(3, 4)), 0, 0
			for i := range 400 {
				now = now.Add(time.Duration(random.IntN(100_000)) * time.Microsecond)
				if i%90 == 89 {
					now = now.Add(-time.Second)
				}
				pool := pools[random.IntN(2)].Global()
				var requests []ratelimit.Request
				paying := random.Perm(len(own))[:1+random.IntN(len(own))]
				if slices.ContainsFunc(paying, func(j int) bool { return modesOf[own[j].Name()] != "" }) {
					pool = pools[0].Global() // one of several rows would pay, if the pool decides alone
				}
				for _, j := range paying {
					requests = append(requests, ratelimit.Borrow(own[j].For(pool.Limit().Name()), pool).Cost(float64(1+random.IntN(3))))
				}
				if random.IntN(4) == 0 {
					requests = append(requests, requests[0].Cost(1))
				}
				if random.IntN(5) == 0 {
					requests = append(requests, pool)
				}
				checked, err := limiter.Check(t.Context(), requests...)
				if errors.Is(err, ratelimit.ErrCostExceedsCapacity) {
					_, err = simulation.Take(t.Context(), now, requests...)
					require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity)
					continue
				}
				require.NoError(t, err)
				want, err := limiter.Take(t.Context(), requests...)
				require.NoError(t, err)
				got, err := simulation.Take(t.Context(), now, requests...)
				require.NoError(t, err)
				require.Equal(t, [...]any{want.Allowed, want.RetryAfter, want.At}, [...]any{got.Allowed, got.RetryAfter, got.At}, "call %d: %v", i, requests)
				require.Equal(t, [...]any{want.Allowed, want.RetryAfter}, [...]any{checked.Allowed, checked.RetryAfter}, "call %d: %v", i, requests)
				for k := range want.States {
					w, g := &want.States[k], &got.States[k]
					require.Equal(t, [...]any{w.Allowed, w.RetryAfter, w.Remaining, w.Mode, w.NotAsked, w.Cost, w.Borrowed, w.Value.Tokens},
						[...]any{g.Allowed, g.RetryAfter, g.Remaining, g.Mode, g.NotAsked, g.Cost, g.Borrowed, g.Value.Tokens}, "call %d, %v", i, w.Limit)
					if w.Borrowed {
						borrowed++
					}
				}
				if !want.Allowed {
					refused++
				}
			}
			t.Logf("%d borrowed, %d refused", borrowed, refused)
			require.Greater(t, borrowed, 10)
			require.Greater(t, refused, 10)
		})
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
