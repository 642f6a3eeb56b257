package ratelimit_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// refusal is a call that is refused at opening, on a bucket that held value then.
type refusal struct {
	limit   ratelimit.Limit
	key     string
	value   float64
	cost    float64
	reserve bool
}

// refusals returns a grid of policies, values and costs, the pairs first that round worst.
func refusals() []refusal {
	all := []refusal{{limit: ratelimit.Define("ninePerMinute", ratelimit.PerMinute(9)), cost: 3}}
	for _, rate := range []float64{9, 0.1, 1.0 / 3, 7, 10, 49, 1000, 40_000} {
		for _, period := range []time.Duration{time.Second, 7 * time.Second, 999_983 * time.Microsecond, time.Minute, time.Hour, ratelimit.Week} {
			for _, p := range []struct {
				maxOwed float64 // 0: none, or more than is worth asking for
				policy  ratelimit.Policy
			}{
				{rate / 3, ratelimit.TokenBucket{Rate: rate, Period: period, MaxReserved: rate / 3}},
				{0, ratelimit.TokenBucket{Rate: rate, Period: period, Capacity: 3 * rate, MaxReserved: ratelimit.NoReservations}},
				{2 * rate, ratelimit.TokenBucket{Rate: rate, Period: period, Capacity: ratelimit.None, MaxReserved: 2 * rate}},
				{rate / 7, ratelimit.FixedWindow{Rate: rate, Period: period, Capacity: 5 * rate, MaxReserved: rate / 7}},
				{0, ratelimit.FixedWindow{Rate: rate, Period: period, Start: opening.Add(-period / 3)}},
			} {
				all = append(all, refusalsOf(ratelimit.Define(fmt.Sprintf("limit%d", len(all)), p.policy), p.maxOwed)...)
			}
		}
	}
	for i := range all {
		all[i].key = fmt.Sprintf("key%d", i)
	}
	return all
}

// refusalsOf returns calls that limit refuses: takes, and reservations beyond the most that may be owed.
func refusalsOf(limit ratelimit.Limit, maxOwed float64) []refusal {
	var refused []refusal
	capacity := limit.Capacity()
	for _, value := range []float64{0, capacity * 0.3, -maxOwed / 9, -20 * capacity} {
		for _, cost := range []float64{capacity, capacity * 0.7, value + capacity*0.1} {
			if cost > max(value, 0) && cost <= capacity {
				refused = append(refused, refusal{limit: limit, value: value, cost: cost})
			}
		}
	}
	for _, value := range []float64{-maxOwed, -maxOwed * 0.9} {
		if cost := maxOwed * 0.31; cost > 0 {
			refused = append(refused, refusal{limit: limit, value: value, cost: cost, reserve: true})
		}
	}
	return refused
}

func (r refusal) String() string {
	return fmt.Sprintf("%v of %v at %v (reserve: %v)", r.cost, r.limit, r.value, r.reserve)
}

// TestRetryAfterIsHonest promises that a lone caller is allowed after RetryAfter, and a caller who retries a microsecond sooner is
// refused.
func TestRetryAfterIsHonest(t *testing.T) {
	t.Parallel()
	for _, r := range refusals() {
		if r.value < 0 {
			continue // which no take leads to
		}
		value, d := r.limit.For(r.key).Full(opening).Take(opening, r.limit.Capacity()-r.value)
		require.True(t, d.Allowed)
		_, d = value.Take(opening, r.cost)
		require.False(t, d.Allowed, "%v is refused", r)
		wait := d.RetryAfter
		_, d = value.Take(opening.Add(wait-time.Microsecond), r.cost)
		require.False(t, d.Allowed, "%v is refused a microsecond before it has waited %v", r, wait)
		require.Equal(t, time.Microsecond, d.RetryAfter, "%v", r)
		_, d = value.Take(opening.Add(wait), r.cost)
		require.True(t, d.Allowed, "%v is admitted when it has waited %v", r, wait)
	}
}

// TestRetryAfterIsHonestOnAServer is the same promise of Take and Reserve.
func TestRetryAfterIsHonestOnAServer(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	grid := refusals()
	require.Greater(t, len(grid), 1000)

	t.Run("OfOneLimit", func(t *testing.T) {
		t.Parallel()
		plantAll(t, pool, grid)
		for i := 0; i < len(grid); i += testsize.Of(53, 11) {
			honest(t, pool, grid[i])
		}
	})
	t.Run("OfSeveralLimits", func(t *testing.T) {
		t.Parallel()
		together := refusals()
		for i := range together {
			together[i].key += "/together"
		}
		plantAll(t, pool, together)
		for i := 0; i+97 < len(together); i += testsize.Of(211, 71) {
			honest(t, pool, together[i], together[i+13], together[i+97])
		}
	})
}

// plantAll writes the rows of the grid, as of opening: an instant within a window counts as its start.
func plantAll(t *testing.T, pool *pgxpool.Pool, grid []refusal) {
	t.Helper()
	_, err := pool.CopyFrom(t.Context(), pgx.Identifier{"ratelimit", "buckets"}, []string{"name", "key", "shard", "value", "ts"},
		pgx.CopyFromSlice(len(grid), func(i int) ([]any, error) {
			return []any{grid[i].limit.Name(), grid[i].key, int32(0), grid[i].value, opening.UnixMicro()}, nil
		}))
	require.NoError(t, err)
}

// honest requests all of the refusals in one call: at opening, and about RetryAfter later.
func honest(t *testing.T, pool *pgxpool.Pool, refused ...refusal) {
	t.Helper()
	now := opening
	limiter, err := ratelimit.New(pool, ratelimit.Config{AsOf: func() time.Time { return now }})
	require.NoError(t, err)
	var requests []ratelimit.Request
	if len(refused) > 1 { // a limit that allows does not affect the wait
		requests = append(requests, ratelimit.Define("ample", ratelimit.PerSecond(10)).For(refused[0].key))
	}
	for _, r := range refused {
		if r.reserve == refused[0].reserve {
			requests = append(requests, r.limit.For(r.key).Cost(r.cost))
		}
	}
	ask := func() ratelimit.Decision {
		t.Helper()
		if refused[0].reserve {
			reservation, err := limiter.Reserve(t.Context(), requests...)
			require.NoError(t, err)
			return reservation.Decision
		}
		d, err := limiter.Take(t.Context(), requests...)
		require.NoError(t, err)
		return d
	}
	first := ask()
	require.False(t, first.Allowed, "%v is refused", refused)
	now = opening.Add(first.RetryAfter - time.Microsecond)
	early := ask()
	require.False(t, early.Allowed, "%v is refused a microsecond before it has waited %v", refused, first.RetryAfter)
	require.Equal(t, time.Microsecond, early.RetryAfter, "%v", refused)
	now = opening.Add(first.RetryAfter)
	require.True(t, ask().Allowed, "%v is admitted when it has waited %v", refused, first.RetryAfter)
}

func TestSpread(t *testing.T) {
	t.Parallel()

	t.Run("IsZeroWithoutASpan", func(t *testing.T) {
		t.Parallel()
		require.Zero(t, ratelimit.Spread(0))
		require.Zero(t, ratelimit.Spread(-time.Second))
		require.Zero(t, ratelimit.SpreadFor("a", 0, 0.5))
		require.Zero(t, ratelimit.SpreadFor("a", -time.Second, 1))
	})

	t.Run("CoversTheSpanAndStaysInIt", func(t *testing.T) {
		t.Parallel()
		const draws, slices = 4000, 10
		var hits [slices]int
		for range draws {
			d := ratelimit.Spread(time.Second)
			require.GreaterOrEqual(t, d, time.Duration(0))
			require.Less(t, d, time.Second)
			hits[d*slices/time.Second]++
		}
		for _, n := range hits { // 400 each, with a standard deviation of 19
			require.InDelta(t, draws/slices, n, 160)
		}
	})
}

func TestSpreadFor(t *testing.T) {
	t.Parallel()

	// With a span of an hour a client may move by (1 - share) of it, and no further.
	for _, test := range []struct {
		share float64
		moves time.Duration
	}{
		{share: 1, moves: 0},
		{share: 2, moves: 0},
		{share: 0.9, moves: 6 * time.Minute},
		{share: 0.5, moves: 30 * time.Minute},
		{share: 0, moves: time.Hour},
		{share: -1, moves: time.Hour},
		{share: math.NaN(), moves: time.Hour},
	} {
		t.Run(fmt.Sprintf("KeepsAClientsPlaceAtShare%v", test.share), func(t *testing.T) {
			t.Parallel()
			low, high := time.Hour, time.Duration(0)
			for range 500 {
				d := ratelimit.SpreadFor("client 7", time.Hour, test.share)
				require.GreaterOrEqual(t, d, time.Duration(0))
				require.Less(t, d, time.Hour)
				low, high = min(low, d), max(high, d)
			}
			require.LessOrEqual(t, high-low, test.moves)
			require.GreaterOrEqual(t, high-low, test.moves*9/10) // and the random part uses the rest
		})
	}

	t.Run("GivesClientsDifferentPlacesAllOverTheSpan", func(t *testing.T) {
		t.Parallel()
		const clients, slices = 4000, 10
		var hits [slices]int
		seen := make(map[time.Duration]bool)
		for i := range clients {
			d := ratelimit.SpreadFor(fmt.Sprintf("client %d", i), time.Hour, 1)
			seen[d] = true
			hits[d*slices/time.Hour]++
		}
		require.Len(t, seen, clients)
		for _, n := range hits {
			require.InDelta(t, clients/slices, n, 160)
		}
	})

	t.Run("IsTheSameInEveryProcess", func(t *testing.T) {
		t.Parallel()
		require.Equal(t, 47*time.Minute, ratelimit.SpreadFor("a", time.Hour, 1).Truncate(time.Minute))
	})
}

func ExampleSpreadFor() {
	// 80 % of the half minute is the client's own, so it returns at much the same place each time.
	retryAfter := 10 * time.Second
	wait := retryAfter + ratelimit.SpreadFor("client 7", 30*time.Second, 0.8)
	fmt.Println(wait >= retryAfter && wait < retryAfter+30*time.Second)
	// Output: true
}
