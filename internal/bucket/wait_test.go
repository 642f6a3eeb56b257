package bucket_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
)

// TestWait compares the wait with the usual formula: (cost - tokens) / rate, rounded up.
func TestWait(t *testing.T) {
	t.Parallel()
	perMinute := buckettest.TokenBucket(10, time.Minute, 10)
	for name, c := range map[string]struct {
		terms        bucket.Terms
		tokens, cost float64
		want         time.Duration
	}{
		"OneOfAnEmptyBucket":         {perMinute, 0, 1, 6 * time.Second},
		"AllOfTheBurst":              {buckettest.TokenBucket(5, time.Second, 10), 0, 10, 2 * time.Second},
		"AThirdOfASecondIsRoundedUp": {buckettest.TokenBucket(3, time.Second, 3), 0, 1, 333_334 * time.Microsecond},
		"AHeavyRequest":              {buckettest.TokenBucket(100, time.Second, 1000), 87.4321, 500, 4_125_679 * time.Microsecond},
		"OwedTokensComeFirst":        {perMinute, -2, 1, 18 * time.Second},
		"WhatRoundsBadly":            {buckettest.TokenBucket(9, time.Minute, 9), 0, 3, 20 * time.Second},
		"EnoughIsThere":              {perMinute, 3, 3, 0},
	} {
		require.Equal(t, c.want, buckettest.Wait(c.terms, bucket.State{Value: c.tokens, TS: opening}, opening, c.cost, 0), name)
	}
}

// TestWaitOfARowThatNeverRecovers is as long as any is said to be, however old the row is.
func TestWaitOfARowThatNeverRecovers(t *testing.T) {
	t.Parallel()
	const longest = time.Duration(bucket.Horizon) * time.Microsecond
	slow := buckettest.FixedWindow(7, bucket.MaxSpan, 7, opening-century/2)
	for _, terms := range []bucket.Terms{buckettest.TokenBucket(1, time.Second, 1), slow} {
		for _, ts := range []int64{bucket.MinInstant, opening - 2*bucket.Horizon, opening} {
			require.Equal(t, longest, buckettest.Wait(terms, bucket.State{Value: -1e300, TS: ts}, opening, 1, 0), "%d", ts)
		}
	}
	require.Equal(t, longest, buckettest.Wait(slow, bucket.State{Value: -91, TS: slow.Begin(opening)}, opening, 7, 0))
}

// TestWaitForSeveralWindows promises that asks with a Within are allowed together after the wait, and not before.
func TestWaitForSeveralWindows(t *testing.T) {
	t.Parallel()
	window := func(hours, after time.Duration, cost float64) bucket.Ask {
		terms := buckettest.FixedWindow(2, hours*time.Hour, 2, opening+after.Microseconds())
		return bucket.Ask{Terms: terms, Cost: cost, Lowest: -10, MayOwe: true, Within: time.Minute}
	}
	for name, test := range map[string]struct {
		asks []bucket.Ask
		want time.Duration
	}{
		"EachInItsLastMinute": {[]bucket.Ask{window(24, 0, 3), window(7, 0, 3)}, 7*24*time.Hour - time.Minute},
		"OneAtAnyTime":        {[]bucket.Ask{window(24, 0, 3), window(7, 0, 2)}, 24*time.Hour - time.Minute},
		"NeverTogether":       {[]bucket.Ask{window(24, 0, 3), window(1, 10*time.Minute, 3)}, time.Duration(bucket.Horizon) * time.Microsecond},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			at := func(now int64) []bucket.Answer {
				rows := make([]bucket.State, len(test.asks))
				for i := range rows {
					test.asks[i].Key.Name = fmt.Sprint(i)
					rows[i] = test.asks[i].Terms.Full(now)
				}
				return pageOf(test.asks, now, rows...).Look(test.asks, nil)
			}
			require.False(t, bucket.AllAllowed(at(opening)))
			require.Equal(t, test.want, bucket.SoonEnoughTogether(test.asks, at(opening)))
			if test.want.Microseconds() < bucket.Horizon {
				require.False(t, bucket.AllAllowed(at(opening+test.want.Microseconds()-1)))
				require.True(t, bucket.AllAllowed(at(opening+test.want.Microseconds())))
			}
		})
	}
}
