package integration_test

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The pure step decides as the database does, to the last bit, along a history of takes. The clock also goes backwards, and is
// sometimes wrong by hours.
func TestThePureStepDecidesAsTheDatabase(t *testing.T) {
	t.Parallel()
	steps := testsize.Of(100, 400)
	for name, policy := range map[string]ratelimit.Policy{
		"Bucket":     ratelimit.TokenBucket{Rate: 7, Period: 3 * time.Second, Capacity: 100. / 3},
		"Windows":    ratelimit.FixedWindow{Rate: 7, Period: 11 * time.Second, Capacity: 100. / 3, Start: clockNoon},
		"OwnWindows": ratelimit.FixedWindow{Rate: 20, Period: 7 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			random := testsize.Rand(t)
			b := setup(t)
			limiter, clock := b.stopped(t)
			limit := ratelimit.Define("step", policy)
			takeOne(t, limiter, limit.For("key")) // so that the row exists: without a row the bucket is full at any time of reading
			pure, err := limiter.Value(t.Context(), limit.For("key"))
			require.NoError(t, err)
			allowed := 0
			for range steps {
				span := lurch(random, clock, 2*time.Second)
				if random.IntN(40) == 0 { // below zero, or back
					require.NoError(t, limiter.Charge(t.Context(), limit.For("key").Cost(20*random.Float64())))
					pure, err = limiter.Value(t.Context(), limit.For("key"))
					require.NoError(t, err)
				}
				cost := []float64{0, 1, limit.Capacity(), 0.01 + 10*random.Float64()}[random.IntN(4)]
				if span < 0 {
					cost = max(cost, 1) // a read shows a wrong clock put right, and leaves it to the next take to do it
				}
				want, err := limiter.Take(t.Context(), limit.For("key").Cost(cost))
				require.NoError(t, err)
				var got ratelimit.Decision
				pure, got = pure.Take(clock.now(), cost)
				require.Equal(t, want, got)
				require.Equal(t, want.States[0].Value, pure)
				if got.Allowed {
					allowed++
				}
			}
			require.Greater(t, allowed, steps/20)
			require.Less(t, allowed, steps*19/20)
		})
	}
}

// lurch sets the clock on by a random span of that mean, which it returns: now and then backwards, or by an hour.
func lurch(random *rand.Rand, clock *clock, mean time.Duration) time.Duration {
	span := time.Duration(random.ExpFloat64() * float64(mean)).Truncate(time.Microsecond)
	switch random.IntN(30) {
	case 0:
		span = -20 * span
	case 1:
		span = time.Duration(random.IntN(3)-1) * time.Hour
	}
	clock.set(clock.now().Add(span))
	return span
}

// Of a limit with Shards the pure step takes from all rows together: it allows what the database allows.
func TestThePureStepTakesFromAllShards(t *testing.T) {
	t.Parallel()
	random := testsize.Rand(t)
	b := setup(t)
	limiter, clock := b.stopped(t)
	limit := ratelimit.Define("step", ratelimit.TokenBucket{Rate: 16, Period: time.Minute, Shards: 8})
	pure, err := limiter.Value(t.Context(), limit.For("key"))
	require.NoError(t, err)
	for range 100 {
		clock.set(clock.now().Add(time.Duration(random.IntN(4)) * time.Second))
		cost := []float64{0.5, 1, 2, 9}[random.IntN(4)]
		want, err := limiter.Take(t.Context(), limit.For("key").Cost(cost))
		require.NoError(t, err)
		_, got := pure.Take(clock.now(), cost)
		require.Equal(t, want.Allowed, got.Allowed)
		if !want.Allowed { // else it is an estimate
			require.InDelta(t, want.Remaining, got.Remaining, 1e-9)
		}
		pure, err = limiter.Value(t.Context(), limit.For("key")) // rows that were full have gained nothing since
		require.NoError(t, err)
	}
}

// Rows that are full gain nothing while others fill, also in what a refusal tells.
func TestThePureStepLetsEachShardFill(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limiter, clock := b.stopped(t)
	limit := ratelimit.Define("step", ratelimit.TokenBucket{Rate: 16, Period: time.Minute, Shards: 8})
	takeOne(t, limiter, limit.For("key").Cost(9)) // makes all rows
	b.exec(t, `UPDATE ratelimit.buckets SET value = CASE WHEN shard = 0 THEN 0 ELSE 2 END`)
	before, err := limiter.Value(t.Context(), limit.For("key"))
	require.NoError(t, err)
	clock.set(clock.now().Add(30 * time.Second))
	want, err := limiter.Take(t.Context(), limit.For("key").Cost(16))
	require.NoError(t, err)
	for _, cost := range []float64{16, 0, math.NaN()} {
		after, got := before.Take(clock.now(), cost)
		require.InDelta(t, 15, got.Remaining, 1e-9, "%v", cost)
		require.InDelta(t, 15, after.Tokens, 1e-9, "%v", cost)
		require.Equal(t, want.ResetAfter, got.ResetAfter)
	}
	_, got := before.Take(clock.now(), 16)
	require.Equal(t, want.RetryAfter, got.RetryAfter)
	require.False(t, got.Allowed)
}

func TestThePureStepRefusesWhatIsNoCost(t *testing.T) {
	t.Parallel()
	const longest = 250 * 365 * ratelimit.Day
	limiter, clock := setup(t).stopped(t)
	value, err := limiter.Value(t.Context(), ratelimit.Define("step", ratelimit.PerSecond(5)).For("key"))
	require.NoError(t, err)
	for _, cost := range []float64{-1, math.NaN(), math.Inf(1), 6, 1e-300} {
		after, d := value.Take(clock.now(), cost)
		require.False(t, d.Allowed)
		require.Equal(t, longest, d.RetryAfter, "%v", cost)
		require.Equal(t, longest, d.States[0].RetryAfter)
		require.InDelta(t, 5, d.Remaining, 0)
		require.Equal(t, value, after)
	}
	after, d := ratelimit.Value{}.Take(clock.now(), 1)
	require.Zero(t, after)
	require.False(t, d.Allowed)
	require.Equal(t, longest, d.RetryAfter)
	require.Len(t, d.States, 1)
	require.ErrorIs(t, d.Err(), ratelimit.ErrLimited)
}

// Full is what the database answers for a bucket that has no row, with and without Shards and windows of its own.
func TestFullIsABucketThatNobodyHasUsed(t *testing.T) {
	t.Parallel()
	limiter, clock := setup(t).stopped(t)
	for name, policy := range map[string]ratelimit.Policy{
		"bucket":  ratelimit.TokenBucket{Rate: 7, Period: 3 * time.Second, Capacity: 100. / 3},
		"shards":  ratelimit.TokenBucket{Rate: 7, Period: 3 * time.Second, Shards: 8},
		"windows": ratelimit.FixedWindow{Rate: 20, Period: 7 * time.Second},
	} {
		for _, request := range []ratelimit.Request{ratelimit.Define(name, policy).For("key"), ratelimit.Define(name, policy).Global()} {
			want, err := limiter.Value(t.Context(), request)
			require.NoError(t, err)
			require.Equal(t, want, request.Cost(9).Full(clock.now()))
		}
	}
	require.Zero(t, ratelimit.Request{}.Full(clock.now()))
}
