package bucket

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestWait holds the wait to the formulas by which it is usually given: (cost - tokens) / rate, in
// seconds or milliseconds rounded up.
func TestWait(t *testing.T) {
	t.Parallel()
	perMinute := tokenBucket(10, time.Minute, 10)
	for _, c := range []struct {
		name         string
		terms        Terms
		tokens, cost float64
		want         time.Duration
		milliseconds int64
		seconds      int64
	}{
		{"OneOfAnEmptyBucket", perMinute, 0, 1, 6 * time.Second, 6000, 6},
		{"ThreeOfAnEmptyBucket", perMinute, 0, 3, 18 * time.Second, 18_000, 18},
		{"FivePerSecondBurstTen", tokenBucket(5, time.Second, 10), 0, 1, 200 * time.Millisecond, 200, 1},
		{"AllOfTheBurst", tokenBucket(5, time.Second, 10), 0, 10, 2 * time.Second, 2000, 2},
		{"APartIsThere", tokenBucket(10, time.Second, 50), 0.25, 1, 75 * time.Millisecond, 75, 1},
		{"AThirdOfASecondIsRoundedUp", tokenBucket(3, time.Second, 3), 0, 1, 333_334 * time.Microsecond, 334, 1},
		{"AHeavyRequest", tokenBucket(100, time.Second, 1000), 87.4321, 500, 4_125_679 * time.Microsecond, 4126, 5},
		{"ADebtComesFirst", perMinute, -2, 1, 18 * time.Second, 18_000, 18},
		{"WhatRoundsBadly", tokenBucket(9, time.Minute, 9), 0, 3, 20 * time.Second, 20_000, 20},
		{"EnoughIsThere", perMinute, 3, 3, 0, 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			wait := c.terms.Wait(State{Value: c.tokens, TS: opening}, opening, c.cost, 0)
			require.Equal(t, c.want, wait)
			require.Equal(t, c.milliseconds, int64((wait+time.Millisecond-1)/time.Millisecond), "in whole milliseconds")
			require.Equal(t, c.seconds, int64((wait+time.Second-1)/time.Second), "in whole seconds")
		})
	}
}

// TestWaitOfARowThatNeverRecovers is as long as any is said to be, however old the row is.
func TestWaitOfARowThatNeverRecovers(t *testing.T) {
	t.Parallel()
	const longest = time.Duration(Horizon) * time.Microsecond
	slow := windows(7, MaxSpan, 7, opening-century/2)
	for _, terms := range []Terms{tokenBucket(1, time.Second, 1), slow} {
		for _, ts := range []int64{MinInstant, opening - 2*Horizon, opening} {
			require.Equal(t, longest, terms.Wait(State{Value: -1e300, TS: ts}, opening, 1, 0), "%d", ts)
		}
	}
	require.Equal(t, longest, slow.Wait(State{Value: -91, TS: slow.Begin(opening)}, opening, 7, 0))
}

// TestFirst finds the smallest number from any estimate, in a number of calls that grows with its error
// only as a logarithm does.
func TestFirst(t *testing.T) {
	t.Parallel()
	const limit = 1 << 50
	for _, want := range []int64{1, 2, 3, 17, 1000, 1 << 40, limit - 1, limit} {
		for _, estimate := range []int64{-5, 1, want / 2, want - 1, want, want + 1, 3 * want, limit, limit + 7} {
			calls := 0
			got := first(estimate, limit, func(n int64) bool { calls++; return n >= want })
			require.Equal(t, want, got, "from %d", estimate)
			require.LessOrEqual(t, calls, 110, "from %d", estimate)
		}
	}
	require.Equal(t, int64(limit), first(9, limit, func(int64) bool { return false }), "when there is none")
}
