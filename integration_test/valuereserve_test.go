package integration_test

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The pure step reserves as the database does, to the last bit, along a history of takes and reservations. The clock also goes
// backwards, and is sometimes wrong by hours.
func TestThePureStepReservesAsTheDatabase(t *testing.T) {
	t.Parallel()
	steps := testsize.Of(100, 400)
	for name, policy := range map[string]ratelimit.Policy{
		"Bucket":      ratelimit.TokenBucket{Rate: 7, Period: 3 * time.Second, Capacity: 100. / 3, MaxReserved: 50. / 3},
		"Spacing":     ratelimit.TokenBucket{Rate: 7, Period: 3 * time.Second, Capacity: ratelimit.None, MaxReserved: 20},
		"NothingOwed": ratelimit.TokenBucket{Rate: 7, Period: 3 * time.Second, MaxReserved: ratelimit.None},
		"Unbounded":   ratelimit.TokenBucket{Rate: 7, Period: time.Second, Capacity: 20},
		"Windows":     ratelimit.FixedWindow{Rate: 7, Period: 11 * time.Second, Capacity: 100. / 3, Start: clockNoon, MaxReserved: 9},
		"OwnWindows":  ratelimit.FixedWindow{Rate: 20, Period: 7 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			random := testsize.Rand(t)
			b := setup(t)
			limiter, clock := b.stopped(t)
			limit := ratelimit.Define("step", policy)
			_, err := limiter.Reserve(t.Context(), limit.For("key")) // so that the row exists
			require.NoError(t, err)
			pure, err := limiter.Value(t.Context(), limit.For("key"))
			require.NoError(t, err)
			allowed, delayed, reserved := 0, 0, 0
			reserve := func(cost float64) (allows bool) {
				want, err := limiter.Reserve(t.Context(), limit.For("key").Cost(cost))
				require.NoError(t, err)
				var got ratelimit.Reservation
				pure, got = pure.Reserve(clock.now(), cost)
				want.ID = ""
				require.Equal(t, want, got, "cost %v", cost)
				require.Equal(t, want.States[0].Value, pure, "cost %v", cost)
				reserved++
				if got.Allowed {
					allowed++
				}
				if got.Delay() > 0 {
					delayed++
				}
				return got.Allowed
			}
			for range steps {
				span := lurch(random, clock, 1500*time.Millisecond)
				costs := []float64{0, 7, 7, 0.01 + 6.9*random.Float64()}
				cost := costs[random.IntN(len(costs))]
				if span < 0 || generalPath { // where a Reserve of nothing writes the arrived tokens
					cost = max(cost, 1) // a read shows a wrong clock put right, and leaves it to the next take to do it
				}
				request := limit.For("key").Cost(cost)
				if limit.Capacity() >= cost && random.IntN(3) == 0 {
					want, err := limiter.Take(t.Context(), request)
					require.NoError(t, err)
					var got ratelimit.Decision
					pure, got = pure.Take(clock.now(), cost)
					require.Equal(t, want, got)
					continue
				}
				reserve(cost)
			}
			require.Greater(t, allowed, reserved/20)
			switch name {
			case "NothingOwed":
				require.Zero(t, delayed)
			case "Unbounded", "OwnWindows":
				require.Equal(t, reserved, allowed)
				return
			default:
				require.Greater(t, delayed, reserved/20)
			}
			for reserve(7) { // to a refusal, which some seeds do not meet before
			}
		})
	}
}

// What no wait would ever meet is refused, as what Reserve returns an error for.
func TestThePureStepRefusesWhatCannotBeReserved(t *testing.T) {
	t.Parallel()
	const longest = 250 * 365 * ratelimit.Day
	now := clockNoon
	full := ratelimit.Define("step", ratelimit.TokenBucket{Rate: 5, Period: time.Second, MaxReserved: 4}).For("key").Full(now)
	for _, cost := range []float64{-1, math.NaN(), math.Inf(1), 9.001, 1e-300} {
		after, r := full.Reserve(now, cost)
		require.False(t, r.Allowed)
		require.Equal(t, longest, r.RetryAfter, "%v", cost)
		require.True(t, r.ReadyAt.IsZero())
		require.Equal(t, full, after)
	}
	after, r := full.Reserve(now, 9)
	require.True(t, r.Allowed)
	require.InDelta(t, -4, after.Tokens, 0)
	require.Equal(t, now.Add(800*time.Millisecond), r.ReadyAt.In(now.Location()))
	require.Empty(t, r.ID)

	forbidden := ratelimit.Define("step", ratelimit.TokenBucket{Rate: 5, Period: time.Second, MaxReserved: ratelimit.NoReservations})
	_, r = forbidden.For("key").Full(now).Reserve(now, 1)
	require.Equal(t, longest, r.RetryAfter)
	_, r = ratelimit.Value{}.Reserve(now, 1)
	require.False(t, r.Allowed)
	require.Equal(t, longest, r.RetryAfter)
}

// Of a limit with Shards the pure step reserves from all rows together.
func TestThePureStepReservesFromAllShards(t *testing.T) {
	t.Parallel()
	random := testsize.Rand(t)
	limiter, clock := setup(t).stopped(t)
	limit := ratelimit.Define("step", ratelimit.TokenBucket{Rate: 16, Period: time.Minute, Shards: 8, MaxReserved: 8})
	pure, err := limiter.Value(t.Context(), limit.For("key"))
	require.NoError(t, err)
	for range 100 {
		clock.set(clock.now().Add(time.Duration(random.IntN(4)) * time.Second))
		cost := []float64{0.5, 1, 2, 9}[random.IntN(4)]
		want, err := limiter.Reserve(t.Context(), limit.For("key").Cost(cost))
		require.NoError(t, err)
		_, got := pure.Reserve(clock.now(), cost)
		require.Equal(t, want.Allowed, got.Allowed)
		require.InDelta(t, want.Remaining, got.Remaining, 1e-9)
		require.InDelta(t, want.Delay(), got.Delay(), float64(time.Microsecond))
		pure = want.States[0].Value
	}
}
