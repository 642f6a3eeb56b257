package take_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/take"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// ruled are the rules of limits by their names.
type ruled map[string]*ratelimit.Ruling

func (r ruled) RulingFor(limit ratelimit.Limit, _, _ string) *ratelimit.Ruling {
	return r[limit.Name()]
}
func (r ruled) RulingsOf(string) []*ratelimit.Ruling { return nil }

func (r ruled) mode(t *testing.T, limit ratelimit.Limit, mode ratelimit.Mode) {
	t.Helper()
	rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Revisions: []ratelimit.Revision{{Mode: mode}}})
	require.NoError(t, err)
	r[limit.Name()] = rule
}

func (r ruled) pause(t *testing.T, limit ratelimit.Limit, until time.Time) {
	t.Helper()
	rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{PausedUntil: until})
	require.NoError(t, err)
	r[limit.Name()] = rule
}

// newRuled returns a Limiter in memory under rules, with the time of clock. A nil clock means the bubble's.
func newRuled(t *testing.T, clock *ratelimittest.Clock, rules ruled) *ratelimit.Limiter {
	t.Helper()
	config := ratelimit.Config{Policies: rules}
	if clock != nil {
		config.AsOf = clock.Now
	}
	limiter, err := ratelimit.New(ratelimittest.NewDB(), config)
	require.NoError(t, err)
	return limiter
}

func tokens(t *testing.T, l *ratelimit.Limiter, r ratelimit.Request) float64 {
	t.Helper()
	v, err := l.Value(t.Context(), r)
	require.NoError(t, err)
	return v.Tokens
}

// inPlaces calls fn with a Limiter, and with one in a transaction.
func inPlaces(t *testing.T, l *ratelimit.Limiter, fn func(t *testing.T, l *ratelimit.Limiter)) {
	t.Helper()
	fn(t, l)
	require.NoError(t, l.InTx(t.Context(), func(tx pgx.Tx) error {
		fn(t, l.WithTx(tx))
		return nil
	}))
}

var (
	ten    = ratelimit.Define("ten", ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: 10})
	bytes  = ratelimit.Define("bytes", ratelimit.FixedWindow{Rate: 100, Period: time.Minute})
	slides = ratelimit.Define("slides", ratelimit.SlidingWindow{Rate: 20, Period: time.Minute})
	slots  = ratelimit.Define("slots", ratelimit.Concurrency{Slots: 3})
)

// TestUpToTakesAllUnits promises that no more units can be taken, whatever they cost, over several limits, and over one
// bucket that is named twice.
func TestUpToTakesAllUnits(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(7, 9))
	clock := ratelimittest.NewClock()
	limiter := ratelimittest.New(t, clock)
	some := 0
	for i := range testkit.Sized(300, 3000) {
		key := fmt.Sprint(i)
		var requests []ratelimit.Request
		for range 1 + random.IntN(2) {
			limit := []ratelimit.Limit{ten, bytes, slides}[random.IntN(3)]
			cost := []float64{0, 0.1, 0.3, 1, 1.0 / 3, 2, math.Pi, 4}[random.IntN(8)]
			requests = append(requests, limit.For(key).Cost(cost))
		}
		requests = append(requests, ten.For(key).Cost(0.7))
		n := 1 + random.IntN(20)
		before, had := tokens(t, limiter, ten.For(key)), requests[len(requests)-1]
		taken, d, err := take.UpTo(t.Context(), limiter, n, requests...)
		require.NoError(t, err)
		require.Equal(t, d.Allowed, taken > 0)
		if taken > 0 {
			require.InDelta(t, 0.7*float64(taken), d.States[len(requests)-1].Cost, 1e-9)
			require.GreaterOrEqual(t, before-tokens(t, limiter, had), 0.7*float64(taken)-1e-9)
		}
		if taken < n {
			some++
			one, err := limiter.Check(t.Context(), requests...)
			require.NoError(t, err)
			require.False(t, one.Allowed, "%d of %d of %v", taken, n, requests)
		}
	}
	require.Greater(t, some, 50)
}

func TestUpTo(t *testing.T) {
	t.Parallel()
	t.Run("ARefusalIsOfOneUnit", func(t *testing.T) {
		t.Parallel()
		limiter := ratelimittest.New(t, ratelimittest.NewClock())
		require.NoError(t, limiter.Require(t.Context(), ten.For("key").Cost(9)))
		inPlaces(t, limiter, func(t *testing.T, l *ratelimit.Limiter) {
			t.Helper()
			n, d, err := take.UpTo(t.Context(), l, 3, ten.For("key").Cost(3))
			require.NoError(t, err)
			require.Equal(t, []any{0, false, 2 * time.Second}, []any{n, d.Allowed, d.RetryAfter})
		})
	})
	t.Run("OtherCallersMayTakeInBetween", func(t *testing.T) {
		t.Parallel()
		db, clock := ratelimittest.NewDB(), ratelimittest.NewClock()
		other, err := ratelimit.New(db, ratelimit.Config{AsOf: clock.Now})
		require.NoError(t, err)
		limiter, err := ratelimit.New(db, ratelimit.Config{AsOf: clock.Now, Refused: func(ctx context.Context, _ ratelimit.Refusal) {
			_, err := other.Take(ctx, ten.For("key").Cost(2))
			require.NoError(t, err)
		}})
		require.NoError(t, err)
		require.NoError(t, other.Require(t.Context(), ten.For("key")))
		n, d, err := take.UpTo(t.Context(), limiter, 10, ten.For("key"))
		require.NoError(t, err)
		require.Equal(t, []any{1, true}, []any{n, d.Allowed}, "9, 7, 5 and 3 were left")
	})
	t.Run("ShadowTakesNoUnitAway", func(t *testing.T) {
		t.Parallel()
		rules := ruled{}
		rules.mode(t, bytes, ratelimit.Shadow)
		limiter := newRuled(t, ratelimittest.NewClock(), rules)
		n, d, err := take.UpTo(t.Context(), limiter, 12, ten.For("key"), bytes.For("key").Cost(30))
		require.NoError(t, err)
		require.Equal(t, []any{10, true, false}, []any{n, d.Allowed, d.States[1].Allowed})
		require.Equal(t, 100.0, tokens(t, limiter, bytes.For("key")))
	})
	t.Run("APauseRefuses", func(t *testing.T) {
		t.Parallel()
		rules, clock := ruled{}, ratelimittest.NewClock()
		rules.pause(t, bytes, clock.Now().Add(time.Hour))
		n, d, err := take.UpTo(t.Context(), newRuled(t, clock, rules), 12, ten.For("key"), bytes.For("key"))
		require.NoError(t, err)
		require.Equal(t, []any{0, false, time.Hour}, []any{n, d.Allowed, d.RetryAfter})
	})
	t.Run("BadInput", func(t *testing.T) {
		t.Parallel()
		limiter := ratelimittest.New(t, ratelimittest.NewClock())
		inPlaces(t, limiter, func(t *testing.T, l *ratelimit.Limiter) {
			t.Helper()
			for says, c := range map[string]struct {
				n    int
				r    ratelimit.Request
				want error
			}{
				"take up to 0 units; ask for 1 or more":          {0, ten.For("key"), ratelimit.ErrInvalidRequest},
				"the cost of a request is the price of one unit": {3, ten.For("key").Cost(0), ratelimit.ErrInvalidCost},
				`11 of "ten", which allows at most 10`:           {math.MaxInt, ten.For("key").Cost(11), ratelimit.ErrCostExceedsCapacity},
				"call Acquire":                                   {3, slots.For("key"), ratelimit.ErrInvalidRequest},
				"it is empty":                                    {3, ten.For(""), ratelimit.ErrInvalidKey},
				"make limits with Define or NewLimit":            {3, ratelimit.Request{}, ratelimit.ErrInvalidLimit},
				"NaN of \"ten\"; a cost is a number from 0 up":   {3, ten.For("key").Cost(math.NaN()), ratelimit.ErrInvalidCost},
				"-3 of \"ten\"; a cost is a number from 0 up":    {3, ten.For("key").Cost(-1), ratelimit.ErrInvalidCost},
			} {
				n, d, err := take.UpTo(t.Context(), l, c.n, c.r)
				require.ErrorIs(t, err, c.want, says)
				require.ErrorContains(t, err, says)
				require.True(t, ratelimit.IsUndecided(err))
				require.Zero(t, n)
				require.False(t, d.Allowed)
			}
		})
		_, _, err := take.UpTo(t.Context(), nil, 3, ten.For("key"))
		require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
	})
}

// queue gains a token each second, and may owe.
var queue = ratelimit.Define("queue", ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: 1, MaxReserved: 100})

// bubble runs a test in a bubble, whose time passes while a call sleeps.
func bubble(t *testing.T, name string, fn func(t *testing.T, l *ratelimit.Limiter, rules ruled)) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			rules := ruled{}
			fn(t, newRuled(t, nil, rules), rules)
		})
	})
}

func TestWait(t *testing.T) {
	t.Parallel()
	// takes returns how long a Wait takes, of which there were enough tokens for the first.
	waits := func(t *testing.T, l *ratelimit.Limiter, r ratelimit.Request) (d ratelimit.Decision, waited time.Duration) {
		t.Helper()
		began := time.Now()
		d, err := take.Wait(t.Context(), l, r)
		require.NoError(t, err)
		return d, time.Since(began)
	}
	bubble(t, "ReturnsWhenItsTurnComes", func(t *testing.T, l *ratelimit.Limiter, _ ruled) {
		t.Helper()
		for i, want := range []time.Duration{0, time.Second, time.Second, 3 * time.Second} {
			d, waited := waits(t, l, queue.For("key").Cost([]float64{1, 1, 1, 3}[i]))
			require.True(t, d.Allowed)
			require.Equal(t, want, waited)
		}
	})
	bubble(t, "ADeadlineThatIsTooSoonReservesNothing", func(t *testing.T, l *ratelimit.Limiter, _ ruled) {
		t.Helper()
		_, err := l.Reserve(t.Context(), queue.For("key").Cost(5))
		require.NoError(t, err)
		began := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		d, err := take.Wait(ctx, l, queue.For("key"))
		require.NoError(t, err)
		require.Equal(t, []any{false, 2 * time.Second, time.Duration(0)}, []any{d.Allowed, d.RetryAfter, time.Since(began)})
		require.Equal(t, -4.0, tokens(t, l, queue.For("key")))
		d, waited := waits(t, l, queue.For("key"))
		require.True(t, d.Allowed)
		require.Equal(t, 5*time.Second, waited)
	})
	bubble(t, "AContextThatEndsReturnsTheTokens", func(t *testing.T, l *ratelimit.Limiter, _ ruled) {
		t.Helper()
		waits(t, l, queue.For("key"))
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(500*time.Millisecond, cancel)
		_, err := take.Wait(ctx, l, queue.For("key").Cost(3))
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, 0.5, tokens(t, l, queue.For("key")))
	})
	bubble(t, "APauseIsWaitedFor", func(t *testing.T, l *ratelimit.Limiter, rules ruled) {
		t.Helper()
		rules.pause(t, queue, time.Now().Add(time.Minute))
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Second)
		defer cancel()
		d, err := take.Wait(ctx, l, queue.For("key"))
		require.NoError(t, err)
		require.Equal(t, []any{false, 10 * time.Second, time.Now().Add(time.Minute)}, []any{d.Allowed, d.RetryAfter, d.States[0].PausedUntil})
		_, waited := waits(t, l, queue.For("key"))
		require.Equal(t, time.Minute, waited)
	})
	bubble(t, "ShadowWaitsForNothing", func(t *testing.T, l *ratelimit.Limiter, rules ruled) {
		t.Helper()
		rules.mode(t, queue, ratelimit.Shadow)
		for range 3 {
			_, waited := waits(t, l, queue.For("key"))
			require.Zero(t, waited)
		}
	})
	bubble(t, "ACostAboveTheCapacityIsOwed", func(t *testing.T, l *ratelimit.Limiter, _ ruled) {
		t.Helper()
		_, waited := waits(t, l, queue.For("key").Cost(21))
		require.Equal(t, 20*time.Second, waited)
		_, err := take.Wait(t.Context(), l, queue.For("key").Cost(102))
		require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity)
	})
	bubble(t, "BadInput", func(t *testing.T, l *ratelimit.Limiter, _ ruled) {
		t.Helper()
		never := ratelimit.Define("never", ratelimit.TokenBucket{Rate: 1, Period: time.Second, MaxReserved: ratelimit.NoReservations})
		for says, c := range map[string]struct {
			r    ratelimit.Request
			want error
		}{
			`wait for "slides", which is never more than 20 in any minute; call Take`: {slides.For("key"), ratelimit.ErrNoReservations},
			`wait for "never"`:                    {never.For("key"), ratelimit.ErrNoReservations},
			"call Acquire":                        {slots.For("key"), ratelimit.ErrInvalidRequest},
			"it is empty":                         {queue.For(""), ratelimit.ErrInvalidKey},
			"make limits with Define or NewLimit": {ratelimit.Request{}, ratelimit.ErrInvalidLimit},
		} {
			_, err := take.Wait(t.Context(), l, queue.For("other"), c.r)
			require.ErrorIs(t, err, c.want, says)
			require.ErrorContains(t, err, says)
			require.True(t, ratelimit.IsUndecided(err))
		}
		require.Equal(t, 1.0, tokens(t, l, queue.For("other")))
		require.ErrorIs(t, l.InTx(t.Context(), func(tx pgx.Tx) error {
			_, err := take.Wait(t.Context(), l.WithTx(tx), queue.For("key"))
			return err
		}), ratelimit.ErrInvalidConfig)
		_, err := take.Wait(t.Context(), nil, queue.For("key"))
		require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
		_, err = take.Wait(context.Context(nil), l, queue.For("key"))
		require.ErrorIs(t, err, ratelimit.ErrInvalidRequest)
	})
}

func TestTurn(t *testing.T) {
	t.Parallel()
	bubble(t, "IsSettledWithItsRealCost", func(t *testing.T, l *ratelimit.Limiter, _ ruled) {
		t.Helper()
		for _, want := range []time.Duration{0, time.Second, time.Second} {
			began := time.Now()
			r, err := take.Turn(t.Context(), l, queue.For("key"))
			require.NoError(t, err)
			require.Equal(t, []any{true, want, r.ReadyAt}, []any{r.Allowed, time.Since(began), time.Now()})
			started, err := l.Started(t.Context(), r.ID)
			require.NoError(t, err)
			require.True(t, started)
			require.NoError(t, l.Settle(t.Context(), r.ID, queue.For("key").Cost(1)))
		}
		r, err := take.Turn(t.Context(), l, queue.For("key").Cost(3))
		require.NoError(t, err)
		require.NoError(t, l.Settle(t.Context(), r.ID, queue.For("key").Cost(5)))
		require.Equal(t, -2.0, tokens(t, l, queue.For("key")))
	})
	bubble(t, "ADeadlineThatIsTooSoonReservesNothing", func(t *testing.T, l *ratelimit.Limiter, _ ruled) {
		t.Helper()
		_, err := l.Reserve(t.Context(), queue.For("key").Cost(5))
		require.NoError(t, err)
		began := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		r, err := take.Turn(ctx, l, queue.For("key"))
		require.NoError(t, err)
		require.Equal(t, []any{false, "", 2 * time.Second, time.Duration(0)}, []any{r.Allowed, r.ID, r.RetryAfter, time.Since(began)})
		require.Equal(t, -4.0, tokens(t, l, queue.For("key")))
	})
	bubble(t, "AContextThatEndsReturnsTheTokens", func(t *testing.T, l *ratelimit.Limiter, _ ruled) {
		t.Helper()
		for _, turn := range []func(ctx context.Context) error{
			func(ctx context.Context) error {
				_, err := take.Turn(ctx, l, queue.For("key").Cost(3))
				return err
			},
			func(ctx context.Context) error {
				r, err := l.Reserve(ctx, queue.For("key").Cost(3))
				require.NoError(t, err)
				return take.Await(ctx, l, r.ID)
			},
		} {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(time.Second, cancel)
			require.ErrorIs(t, turn(ctx), context.Canceled)
			require.Equal(t, 1.0, tokens(t, l, queue.For("key")))
		}
	})
	bubble(t, "ALimitThatIsOffOrInShadowWaitsForNothing", func(t *testing.T, l *ratelimit.Limiter, rules ruled) {
		t.Helper()
		for _, mode := range []ratelimit.Mode{ratelimit.Off, ratelimit.Shadow} {
			rules.mode(t, queue, mode)
			began := time.Now()
			r, err := take.Turn(t.Context(), l, queue.For("key").Cost(20))
			require.NoError(t, err)
			require.True(t, r.Allowed)
			require.NoError(t, l.Settle(t.Context(), r.ID, queue.For("key").Cost(30)))
			require.Zero(t, time.Since(began))
		}
	})
	bubble(t, "AReservationThatEndedHasNoTurn", func(t *testing.T, l *ratelimit.Limiter, _ ruled) {
		t.Helper()
		r, err := l.Reserve(t.Context(), queue.For("key").Cost(3))
		require.NoError(t, err)
		require.NoError(t, l.Cancel(t.Context(), r.ID))
		require.ErrorIs(t, take.Await(t.Context(), l, r.ID), ratelimit.ErrReservationEnded)
		require.ErrorIs(t, take.Await(t.Context(), l, "no ID"), ratelimit.ErrNotReserved)
		require.ErrorIs(t, l.InTx(t.Context(), func(tx pgx.Tx) error {
			require.ErrorIs(t, take.Await(t.Context(), l.WithTx(tx), r.ID), ratelimit.ErrInvalidConfig)
			_, err := take.Turn(t.Context(), l.WithTx(tx), queue.For("key"))
			return err
		}), ratelimit.ErrInvalidConfig)
	})
}

var (
	guarantee = ratelimit.Define("guarantee", ratelimit.TokenBucket{Rate: 4, Period: time.Second, Capacity: 8})
	pool      = ratelimit.Define("pool", ratelimit.TokenBucket{Rate: 8, Period: time.Second, Capacity: 16})
)

// TestBorrowPaysFromTheGuaranteeOrThePool compares Borrow with arithmetic on dyadic numbers, which are exact.
func TestBorrowPaysFromTheGuaranteeOrThePool(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(5, 6))
	clock := ratelimittest.NewClock()
	limiter := ratelimittest.New(t, clock)
	own, left := map[string]float64{"a": 8, "b": 8}, 16.0
	var paid, borrowed, refused int
	undone := errors.New("undone")
	for range testkit.Sized(500, 5000) {
		gone := random.IntN(4) * 125
		clock.Advance(time.Duration(gone) * time.Millisecond)
		for key := range own {
			own[key] = min(8, own[key]+4*float64(gone)/1000)
		}
		left = min(16, left+8*float64(gone)/1000)
		key, cost := []string{"a", "b"}[random.IntN(2)], float64(1+random.IntN(40))/4
		wait := time.Duration((cost - left) / 8 * 1e9)
		if cost <= 8 {
			wait = min(wait, time.Duration((cost-own[key])/4*1e9))
		}

		call := func(l *ratelimit.Limiter) ratelimit.Decision {
			d, err := take.Borrow(t.Context(), l, cost, guarantee.For(key), pool.Global())
			require.NoError(t, err)
			return d
		}
		var d ratelimit.Decision
		switch random.IntN(3) {
		case 0:
			require.ErrorIs(t, limiter.InTx(t.Context(), func(tx pgx.Tx) error {
				call(limiter.WithTx(tx))
				return undone
			}), undone)
			continue
		case 1:
			require.NoError(t, limiter.InTx(t.Context(), func(tx pgx.Tx) error {
				d = call(limiter.WithTx(tx))
				return nil
			}))
		default:
			d = call(limiter)
		}
		switch {
		case own[key] >= cost:
			own[key], left, paid = own[key]-cost, left-cost, paid+1
			require.True(t, d.Allowed)
			require.Len(t, d.States, 1)
		case left >= cost:
			left, borrowed = left-cost, borrowed+1
			require.True(t, d.Allowed)
		default:
			refused++
			require.False(t, d.Allowed)
			require.Equal(t, wait, d.RetryAfter)
		}
		require.InDelta(t, own[key], tokens(t, limiter, guarantee.For(key)), 1e-9)
		require.InDelta(t, left, tokens(t, limiter, pool.Global()), 1e-9)
	}
	require.Greater(t, min(paid, borrowed, refused), 20)
}

func TestBorrow(t *testing.T) {
	t.Parallel()
	both := func(t *testing.T, l *ratelimit.Limiter, n float64) ratelimit.Decision {
		t.Helper()
		d, err := take.Borrow(t.Context(), l, n, guarantee.For("key"), pool.Global())
		require.NoError(t, err)
		return d
	}
	t.Run("ThePoolDecidesAloneIfTheGuaranteeIsNotEnforced", func(t *testing.T) {
		t.Parallel()
		for _, mode := range []ratelimit.Mode{ratelimit.Off, ratelimit.Shadow} {
			rules := ruled{}
			rules.mode(t, guarantee, mode)
			limiter := newRuled(t, ratelimittest.NewClock(), rules)
			require.True(t, both(t, limiter, 6).Allowed)
			require.True(t, both(t, limiter, 8).Allowed)
			d := both(t, limiter, 4)
			require.Equal(t, []any{false, 250 * time.Millisecond}, []any{d.Allowed, d.RetryAfter})
			require.Equal(t, 2.0, tokens(t, limiter, pool.Global()))
		}
	})
	t.Run("APoolThatIsNotEnforcedRefusesNothing", func(t *testing.T) {
		t.Parallel()
		for _, mode := range []ratelimit.Mode{ratelimit.Off, ratelimit.Shadow} {
			rules := ruled{}
			rules.mode(t, pool, mode)
			limiter := newRuled(t, ratelimittest.NewClock(), rules)
			for range 9 {
				require.True(t, both(t, limiter, 4).Allowed)
			}
			require.Zero(t, tokens(t, limiter, guarantee.For("key")))
		}
	})
	t.Run("APauseOfTheGuaranteeRefuses", func(t *testing.T) {
		t.Parallel()
		rules, clock := ruled{}, ratelimittest.NewClock()
		rules.pause(t, guarantee, clock.Now().Add(time.Hour))
		d := both(t, newRuled(t, clock, rules), 1)
		require.Equal(t, []any{false, time.Hour}, []any{d.Allowed, d.RetryAfter})
	})
	t.Run("APauseOfThePoolStopsBorrowers", func(t *testing.T) {
		t.Parallel()
		rules, clock := ruled{}, ratelimittest.NewClock()
		rules.pause(t, pool, clock.Now().Add(time.Hour))
		limiter := newRuled(t, clock, rules)
		require.True(t, both(t, limiter, 8).Allowed)
		d := both(t, limiter, 1)
		require.Equal(t, []any{false, 250 * time.Millisecond}, []any{d.Allowed, d.RetryAfter})
		require.Equal(t, 8.0, tokens(t, limiter, pool.Global()))
	})
	t.Run("BadInput", func(t *testing.T) {
		t.Parallel()
		limiter := ratelimittest.New(t, ratelimittest.NewClock())
		inPlaces(t, limiter, func(t *testing.T, l *ratelimit.Limiter) {
			t.Helper()
			for says, c := range map[string]struct {
				tokens    float64
				own, pool ratelimit.Request
				want      error
			}{
				`"pool" would borrow from itself`:                                 {1, pool.Global(), pool.Global(), ratelimit.ErrInvalidRequest},
				`borrow from "slides", which is never more than 20 in any minute`: {1, guarantee.For("key"), slides.For("key"), ratelimit.ErrInvalidRequest},
				`borrow from "slots"`:                                             {1, guarantee.For("key"), slots.For("key"), ratelimit.ErrInvalidRequest},
				"call Acquire":                                                    {1, slots.For("key"), pool.Global(), ratelimit.ErrInvalidRequest},
				`17 of "pool", which allows at most`:                              {17, guarantee.For("key"), pool.Global(), ratelimit.ErrCostExceedsCapacity},
				"-1 of \"pool\"":                                                  {-1, guarantee.For("key"), pool.Global(), ratelimit.ErrInvalidCost},
				`invalid key for "pool"`:                                          {1, guarantee.For("key"), pool.For(""), ratelimit.ErrInvalidKey},
				"make limits with Define or NewLimit":                             {1, guarantee.For("key"), ratelimit.Request{}, ratelimit.ErrInvalidLimit},
			} {
				_, err := take.Borrow(t.Context(), l, c.tokens, c.own, c.pool)
				require.ErrorIs(t, err, c.want, says)
				require.ErrorContains(t, err, says)
				require.True(t, ratelimit.IsUndecided(err))
			}
		})
		require.Equal(t, 8.0, tokens(t, limiter, guarantee.For("key")))
		_, err := take.Borrow(t.Context(), nil, 1, guarantee.For("key"), pool.Global())
		require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
		_, err = take.Borrow(context.Context(nil), limiter, 1, guarantee.For("key"), pool.Global())
		require.ErrorIs(t, err, ratelimit.ErrInvalidRequest)
	})
}
