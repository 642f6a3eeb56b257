package ratelimit_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func TestShardsAreAPowerOfTwoUpTo64(t *testing.T) {
	t.Parallel()
	for shards, valid := range map[int]bool{
		0: true, 1: true, 2: true, 4: true, 8: true, 16: true, 32: true, 64: true,
		-1: false, -8: false, 3: false, 6: false, 63: false, 65: false, 128: false, math.MaxInt: false, math.MinInt: false,
	} {
		for _, policy := range []ratelimit.Policy{
			ratelimit.TokenBucket{Rate: 10, Period: time.Second, Shards: shards},
			ratelimit.FixedWindow{Rate: 10, Period: time.Second, Shards: shards},
		} {
			_, err := ratelimit.NewLimit("spread", policy)
			if valid {
				require.NoError(t, err)
				continue
			}
			require.ErrorIs(t, err, ratelimit.ErrInvalidLimit)
			require.EqualError(t, err, fmt.Sprintf(`ratelimit: invalid limit "spread": its Shards is %d; it must be 1, 2, 4, 8, 16, 32 or 64, so that each row's part is exact`, shards))
		}
	}
}

// TestShardsAreRows promises one row for each shard of the policy, after a call that takes from all of them.
func TestShardsAreRows(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	limiter := newLimiter(t, pool, ratelimit.Config{})
	for _, shards := range []int{0, 1, 2, 16, 64} {
		key := fmt.Sprint(shards)
		limit := ratelimit.Define("spread", ratelimit.TokenBucket{Rate: 64, Period: time.Minute, Shards: shards})
		d, err := limiter.Take(t.Context(), limit.For(key).Cost(64))
		require.NoError(t, err)
		require.True(t, d.Allowed)
		var rows int
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM ratelimit.buckets WHERE key = $1", key).Scan(&rows))
		require.Equal(t, max(shards, 1), rows)
	}
}

func TestValueOfAShardedBucket(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	limiter := newLimiter(t, pool, ratelimit.Config{})
	request := ratelimit.Define("spread", ratelimit.TokenBucket{Rate: 4, Period: time.Second, Capacity: 8, Shards: 4}).For("a")
	plant(t, pool,
		planted{name: "spread", key: "a", shard: 0, value: 2},
		planted{name: "spread", key: "a", shard: 1, value: 0, after: ratelimit.Day},
		planted{name: "spread", key: "a", shard: 2, value: 2},
		planted{name: "spread", key: "a", shard: 3, value: 1})
	v, err := limiter.Value(t.Context(), request)
	require.NoError(t, err)
	require.Equal(t, 5.0, v.Tokens)
	require.Equal(t, 5.0, v.At(opening.Add(-time.Hour)), "instants before the reading count as it")
	require.Equal(t, 7.0, v.At(opening.Add(time.Second)), "the row with a wrong clock gains, too")
	require.Equal(t, 8.0, v.At(opening.Add(time.Hour)))
	wait, err := v.RetryAfter(opening, 7)
	require.NoError(t, err)
	require.Equal(t, time.Second, wait)
	_, err = v.RetryAfter(opening, 9)
	require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity)
	d, err := limiter.Check(t.Context(), request)
	require.NoError(t, err)
	require.Equal(t, 2*time.Second, d.ResetAfter)
}
