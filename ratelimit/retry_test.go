package ratelimit_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Of an hour, the place of a client moves by (1 - share), and the places of different clients are all over the hour.
func TestSpread(t *testing.T) {
	t.Parallel()
	for _, none := range []time.Duration{0, -time.Second} {
		require.Zero(t, ratelimit.Spread(none))
		require.Zero(t, ratelimit.SpreadFor("a", none, 0.5))
	}
	require.Equal(t, 47*time.Minute, ratelimit.SpreadFor("a", time.Hour, 1).Truncate(time.Minute), "in every process")
	for share, moves := range map[float64]time.Duration{
		1: 0, 2: 0, 0.9: 6 * time.Minute, 0.5: 30 * time.Minute, 0: time.Hour, -1: time.Hour, math.NaN(): time.Hour,
	} {
		low, high := time.Hour, time.Duration(0)
		for range 500 {
			d := ratelimit.SpreadFor("client 7", time.Hour, share)
			low, high = min(low, d), max(high, d)
		}
		require.True(t, low >= 0 && high < time.Hour)
		require.True(t, high-low <= moves && high-low >= moves*9/10, "share %v: %v", share, high-low)
	}
	const draws, slices = 4000, 10
	for name, draw := range map[string]func(i int) time.Duration{
		"Spread":    func(int) time.Duration { return ratelimit.Spread(time.Hour) },
		"SpreadFor": func(i int) time.Duration { return ratelimit.SpreadFor(fmt.Sprintf("client %d", i), time.Hour, 1) },
	} {
		var hits [slices]int
		for i := range draws {
			hits[draw(i)*slices/time.Hour]++
		}
		for _, n := range hits { // 400 each, with a standard deviation of 19
			require.InDelta(t, draws/slices, n, 160, name)
		}
	}
}

func ExampleSpreadFor() {
	// 80 % of the half minute is the client's own, so it returns at much the same place each time.
	retryAfter := 10 * time.Second
	wait := retryAfter + ratelimit.SpreadFor("client 7", 30*time.Second, 0.8)
	fmt.Println(wait >= retryAfter && wait < retryAfter+30*time.Second)
	// Output: true
}
