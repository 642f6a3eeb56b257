package ratelimit_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

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
			require.GreaterOrEqual(t, high-low, test.moves*9/10) // and uses what is left to chance
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
