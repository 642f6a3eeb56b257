package integration_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// slider is a window from which nothing falls out during a test.
var slider = ratelimit.Define("slider", ratelimit.SlidingWindow{Rate: 1e6, Period: ratelimit.Week})

// slidingDesk is a limiter with a clock of the test's own.
type slidingDesk struct {
	*ratelimit.Limiter
	now atomic.Int64
}

func (b *bundle) slidingDesk(t *testing.T, config ratelimit.Config) *slidingDesk {
	t.Helper()
	d := &slidingDesk{}
	d.at(0)
	config.AsOf = func() time.Time { return time.UnixMicro(d.now.Load()) }
	d.Limiter = b.with(t, config)
	return d
}

// at sets the clock to so much after noon.
func (d *slidingDesk) at(after time.Duration) { d.now.Store(clockNoon.Add(after).UnixMicro()) }

// tokens returns what the bucket holds.
func (d *slidingDesk) tokens(t *testing.T, request ratelimit.Request) float64 {
	t.Helper()
	v, err := d.Value(t.Context(), request)
	require.NoError(t, err)
	return v.Tokens
}

// requireTake takes, and says whether it is to be allowed, and when it would be.
func (d *slidingDesk) requireTake(t *testing.T, retryAfter time.Duration, requests ...ratelimit.Request) ratelimit.Decision {
	t.Helper()
	decision, err := d.Take(t.Context(), requests...)
	require.NoError(t, err)
	require.Equal(t, retryAfter, decision.RetryAfter, "%+v", decision)
	require.Equal(t, retryAfter == 0, decision.Allowed)
	return decision
}

// perMinute gives n in any minute, and counts in slices of 10 s.
func perMinute(name string, n float64) ratelimit.Limit {
	return ratelimit.Define(name, ratelimit.SlidingWindow{Rate: n, Period: time.Minute, Slices: 6})
}

func TestSlidingWindow(t *testing.T) {
	t.Parallel()
	b := setup(t)

	t.Run("GivesBackAPeriodAfterTheSlice", func(t *testing.T) {
		t.Parallel()
		d, limit := b.slidingDesk(t, ratelimit.Config{}), perMinute("gives", 10)
		d.requireTake(t, 0, limit.Global().Cost(6))
		d.at(15 * time.Second)
		decision := d.requireTake(t, 0, limit.Global().Cost(4))
		require.Zero(t, decision.Remaining)
		require.Equal(t, 65*time.Second, decision.ResetAfter)
		d.requireTake(t, 55*time.Second, limit.Global())
		d.at(70*time.Second - time.Microsecond)
		d.requireTake(t, time.Microsecond, limit.Global())
		d.at(70 * time.Second)
		decision = d.requireTake(t, 0, limit.Global())
		require.InDelta(t, 5, decision.Remaining, 0)
		d.requireTake(t, 10*time.Second, limit.Global().Cost(9))
		check, err := d.Check(t.Context(), limit.Global().Cost(5))
		require.NoError(t, err)
		require.True(t, check.Allowed)
		require.InDelta(t, 5, check.States[0].Value.Tokens, 0)
		require.InDelta(t, 9, check.States[0].Value.At(clockNoon.Add(80*time.Second)), 0)
	})

	t.Run("ARefusalIsNotCounted", func(t *testing.T) {
		t.Parallel()
		d, limit := b.slidingDesk(t, ratelimit.Config{}), perMinute("refuses", 3)
		d.requireTake(t, 0, limit.For("a").Cost(3))
		before := b.row(t, "refuses", "a")
		for range 50 {
			d.requireTake(t, 70*time.Second, limit.For("a"))
		}
		require.Equal(t, before, b.row(t, "refuses", "a"))
		d.at(70 * time.Second)
		d.requireTake(t, 0, limit.For("a").Cost(3))
	})

	t.Run("CreditsAndCharges", func(t *testing.T) {
		t.Parallel()
		ctx := t.Context()
		d, limit := b.slidingDesk(t, ratelimit.Config{}), perMinute("verbs", 10)
		request := limit.For("a")
		require.NoError(t, d.Credit(ctx, request.Cost(5)), "of a bucket that nobody has used")
		require.InDelta(t, 10, d.tokens(t, request), 0)
		first := d.requireTake(t, 0, request.Cost(4))
		d.at(20 * time.Second)
		d.requireTake(t, 0, request.Cost(6))
		require.NoError(t, d.CreditTaken(ctx, first.At, request.Cost(3)))
		require.InDelta(t, 3, d.tokens(t, request), 0)
		require.NoError(t, d.CreditTaken(ctx, first.At, request.Cost(9)), "more than was taken then")
		require.InDelta(t, 4, d.tokens(t, request), 0)
		require.NoError(t, d.Credit(ctx, request.Cost(2)))
		require.InDelta(t, 6, d.tokens(t, request), 0)
		require.NoError(t, d.Charge(ctx, request.Cost(20)))
		require.InDelta(t, -14, d.tokens(t, request), 0)
		d.requireTake(t, 70*time.Second, request)
		d.at(85 * time.Second)
		require.NoError(t, d.CreditTaken(ctx, first.At, request), "it has fallen out")
		require.InDelta(t, -14, d.tokens(t, request), 0)
		require.NoError(t, d.Reset(ctx, request))
		d.requireTake(t, 0, request.Cost(10))
		_, err := d.Reserve(ctx, request)
		require.ErrorIs(t, err, ratelimit.ErrNoReservations)
		require.ErrorContains(t, err, "call Take, and again after its RetryAfter")
		_, err = d.Take(ctx, request.Cost(11))
		require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity)
	})

	t.Run("AClockThatStepsBack", func(t *testing.T) {
		t.Parallel()
		d, limit := b.slidingDesk(t, ratelimit.Config{}), perMinute("back", 10)
		d.at(30 * time.Second)
		d.requireTake(t, 0, limit.Global().Cost(6))
		d.at(0)
		d.requireTake(t, 0, limit.Global().Cost(4))
		d.requireTake(t, 100*time.Second, limit.Global())
		d.at(100 * time.Second)
		d.requireTake(t, 0, limit.Global().Cost(10))
		d.at(-time.Hour) // what wrote the row was wrong
		d.requireTake(t, 70*time.Second, limit.Global())
		d.at(-time.Hour + 70*time.Second)
		d.requireTake(t, 0, limit.Global().Cost(10))
	})
}

func TestSlidingWindowAmongOthers(t *testing.T) {
	t.Parallel()
	b := setupWork(t)
	for _, level := range levels {
		t.Run(level.name, func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			d, key := b.slidingDesk(t, ratelimit.Config{}), t.Name()
			window, bucket := perMinute("m-window", 5), ratelimit.Define("a-bucket", hoard(8))
			last := perMinute("z-window", 6)
			all := func(cost float64) []ratelimit.Request {
				return []ratelimit.Request{window.For(key).Cost(cost), last.For(key).Cost(cost), bucket.For(key).Cost(cost)}
			}
			for range 2 {
				tx := b.begin(t, level.level)
				in := d.WithTx(tx)
				decision, err := in.Take(ctx, all(2)...)
				require.NoError(t, err)
				require.True(t, decision.Allowed)
				require.NoError(t, tx.Commit(ctx))
			}
			before := b.rows(t, key)
			require.Len(t, before, 3)
			tx := b.begin(t, level.level)
			decision, err := d.WithTx(tx).Take(ctx, all(2)...)
			require.NoError(t, err)
			require.Equal(t, []bool{false, true, true}, []bool{decision.States[0].Allowed, decision.States[1].Allowed, decision.States[2].Allowed})
			require.Equal(t, 70*time.Second, decision.RetryAfter)
			_, err = tx.Exec(ctx, "INSERT INTO work VALUES ($1)", key)
			require.NoError(t, err, "the transaction goes on")
			require.NoError(t, tx.Commit(ctx))
			require.Equal(t, before, b.rows(t, key), "nothing was taken")

			tx = b.begin(t, level.level)
			decision, err = d.WithTx(tx).Take(ctx, window.For(key))
			require.NoError(t, err)
			require.True(t, decision.Allowed)
			decision, err = d.WithTx(tx).Take(ctx, window.For(key))
			require.NoError(t, err)
			require.False(t, decision.Allowed)
			require.NoError(t, tx.Rollback(ctx))
			require.Equal(t, before, b.rows(t, key), "a rollback gives back")
		})
	}
}

// TestSlidingWindowGivesNoMoreInAnyPeriod counts, by brute force, what was given in every span of a Period, by calls alone,
// in batches and in transactions, on a clock that also steps back.
func TestSlidingWindowGivesNoMoreInAnyPeriod(t *testing.T) {
	t.Parallel()
	b := setup(t)
	d := b.slidingDesk(t, ratelimit.Config{})
	random := testsize.Rand(t)
	limit := ratelimit.Define("brute", ratelimit.SlidingWindow{Rate: 20, Period: 6 * time.Second, Slices: 6})
	type given struct {
		at     int64
		amount float64
	}
	var all []given
	now, latest := d.now.Load(), int64(0)
	for range 300 {
		now += random.Int64N(800_000)
		if random.IntN(10) == 0 {
			now -= random.Int64N(5_000_000)
		}
		d.now.Store(now)
		cost, took := float64(1+random.IntN(6)), 0.0
		request := limit.Global().Cost(cost)
		switch random.IntN(3) {
		case 0:
			decision, err := d.Take(t.Context(), request)
			require.NoError(t, err)
			if decision.Allowed {
				took = cost
			}
		case 1:
			took = cost * float64(admitted(t, d.Limiter, request, 4, 1))
		default:
			_, err := atonce.Tx(t.Context(), b.db(), pgx.Serializable, func(tx pgx.Tx) error {
				decision, err := d.WithTx(tx).Take(t.Context(), request)
				took = 0
				if decision.Allowed {
					took = cost
				}
				return err
			})
			require.NoError(t, err)
		}
		if took > 0 {
			latest = max(latest, now)
			all = append(all, given{latest, took})
		}
	}
	most := 0.0
	for i := range all {
		sum := 0.0
		for _, g := range all[i:] {
			if g.at <= all[i].at+6_000_000 {
				sum += g.amount
			}
		}
		most = max(most, sum)
	}
	require.LessOrEqual(t, most, 20.0)
	require.Greater(t, most, 15.0, "the bound is nearly reached")
}

// TestSlidingWindowIsPruned has Prune delete what is full, and nothing else.
func TestSlidingWindowIsPruned(t *testing.T) {
	t.Parallel()
	onEach(t, testSlidingWindowIsPruned, onPostgres, inMemory, inPartitions)
}

func testSlidingWindowIsPruned(t *testing.T, on backend) {
	b := on.setup(t)
	d, limit := b.slidingDesk(t, ratelimit.Config{}), perMinute("pruned", 10)
	d.requireTake(t, 0, limit.For("a").Cost(10))
	lowered := perMinute("pruned", 1)
	for after := time.Duration(0); after < 3*time.Minute; after += 7 * time.Second {
		d.at(after)
		n, err := d.Prune(t.Context(), lowered)
		require.NoError(t, err)
		if after < 70*time.Second {
			require.Zero(t, n)
			require.InDelta(t, 0, d.tokens(t, limit.For("a")), 0)
			require.InDelta(t, -9, d.tokens(t, lowered.For("a")), 0)
		}
	}
	require.Empty(t, b.rows(t, "a"))
	require.InDelta(t, 10, d.tokens(t, limit.For("a")), 0)
}

// TestSlidingWindowRefusalsFromMemory has the refusal cache answer as the database would.
func TestSlidingWindowRefusalsFromMemory(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limit := ratelimit.Define("remembered", ratelimit.SlidingWindow{Rate: 10, Period: time.Second, Slices: 10})
	cached, plain := b.slidingDesk(t, ratelimit.Config{RefusalCache: 100}), b.slidingDesk(t, ratelimit.Config{})
	random := testsize.Rand(t)
	now, refused := clockNoon, 0
	for i := range 400 {
		now = now.Add(time.Duration(random.IntN(40)) * time.Millisecond)
		cached.now.Store(now.UnixMicro())
		plain.now.Store(now.UnixMicro())
		request := limit.Global().Cost(float64(1 + random.IntN(4)))
		want, err := plain.Check(t.Context(), request)
		require.NoError(t, err)
		got, err := cached.Take(t.Context(), request)
		require.NoError(t, err)
		require.Equal(t, want.Allowed, got.Allowed, "step %d", i)
		require.Equal(t, want.RetryAfter, got.RetryAfter)
		if !got.Allowed {
			refused++
			require.InDelta(t, want.Remaining, got.Remaining, 0)
			require.Equal(t, want.ResetAfter, got.ResetAfter)
			require.InDelta(t, want.States[0].Value.At(now.Add(time.Second)), got.States[0].Value.At(now.Add(time.Second)), 0)
		}
	}
	require.Greater(t, refused, 100)
}

// TestSlidingWindowIsSimulatedAsItDecides holds Simulation and Value.Take to the database.
func TestSlidingWindowIsSimulatedAsItDecides(t *testing.T) {
	t.Parallel()
	b := setup(t)
	d, limit := b.slidingDesk(t, ratelimit.Config{}), perMinute("simulated", 10)
	simulation, err := ratelimit.NewSimulation(ratelimit.Config{})
	require.NoError(t, err)
	value := limit.Global().Full(clockNoon.Add(-time.Hour)) // the first step may go back
	random := testsize.Rand(t)
	now := clockNoon
	for i := range 300 {
		now = now.Add(time.Duration(random.Int64N(int64(12 * time.Second))))
		if random.IntN(8) == 0 {
			now = now.Add(-time.Duration(random.Int64N(int64(40 * time.Second))))
		}
		d.now.Store(now.UnixMicro())
		cost := float64(1+random.IntN(12)) / 3
		want, err := d.Take(t.Context(), limit.Global().Cost(cost))
		require.NoError(t, err)
		simulated, err := simulation.Take(t.Context(), now, limit.Global().Cost(cost))
		require.NoError(t, err)
		var stepped ratelimit.Decision
		value, stepped = value.Take(now, cost)
		for _, got := range []ratelimit.Decision{simulated, stepped} {
			require.Equal(t, fmt.Sprint(want.Allowed, want.RetryAfter, want.Remaining, want.ResetAfter),
				fmt.Sprint(got.Allowed, got.RetryAfter, got.Remaining, got.ResetAfter), "step %d", i)
		}
	}
}
