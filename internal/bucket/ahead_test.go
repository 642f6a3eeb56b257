package bucket_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
)

func TestReturnable(t *testing.T) {
	t.Parallel()
	terms := buckettest.TokenBucket(1, time.Millisecond, 100)
	for name, test := range map[string]struct {
		ahead   bucket.Ahead
		ts, now int64
		want    float64
	}{
		"AtOnce":                    {bucket.Ahead{Taken: 10, Left: 4}, 0, 0, 4},
		"UsedFasterThanTheRate":     {bucket.Ahead{Taken: 10, Left: 4}, 0, 6000, 4},
		"LessThanHasArrived":        {bucket.Ahead{Taken: 10, Left: 4}, 0, 7500, 2.5},
		"AllHasArrivedSince":        {bucket.Ahead{Taken: 10, Left: 4}, 0, 10_000, 0},
		"TheRowIsLater":             {bucket.Ahead{Taken: 10, Left: 4}, 9000, 7000, 1},
		"TheClockHasSteppedBack":    {bucket.Ahead{Taken: 10, Left: 4, TS: 5000}, 5000, 0, 4},
		"NothingIsLeft":             {bucket.Ahead{Taken: 10}, 0, 0, 0},
		"LongAfterNothingComesBack": {bucket.Ahead{Taken: 10, Left: 10}, 0, bucket.MaxInstant, 0},
	} {
		require.InDelta(t, test.want, test.ahead.Returnable(&terms, test.ts, test.now), 0, name)
	}
}

func TestKeptFor(t *testing.T) {
	t.Parallel()
	const second = 1_000_000
	tokens := buckettest.TokenBucket(1, time.Second, 100)
	tokens.Prefetch = 2 * second
	require.EqualValues(t, 2*second, bucket.KeptFor(&tokens, 0))
	eras := bucket.NewEras([]bucket.Era{{Terms: tokens}, {From: 3 * second, Terms: tokens}})
	for now, want := range map[int64]int64{0: 2 * second, second: 2 * second, 2 * second: second, 3*second - 1: 1} {
		first := eras.Holding(0)
		require.Equal(t, want, bucket.KeptFor(&first, now), "until the terms end, at %d", now)
	}

	windows := buckettest.FixedWindow(1, 10*time.Second, 100, 3*second)
	windows.Prefetch = 2 * second
	for name, test := range map[string]struct{ now, want int64 }{
		"AtTheBeginning":    {3 * second, 2 * second},
		"Long":              {10 * second, 2 * second},
		"UntilTheEnd":       {12 * second, second - second/1000 - 1}, // less what clocks differ by
		"AtTheEnd":          {13*second - 1, 0},
		"OfTheNext":         {13 * second, 2 * second},
		"BeforeAllAreZero":  {-8 * second, second - second/1000 - 1},
		"InTheFirstOfTerms": {bucket.MinInstant, 2 * second},
	} {
		require.Equal(t, test.want, bucket.KeptFor(&windows, test.now), name)
	}
}

// The rest of a window may be returned until its end, by the row and by the clock, and not a microsecond later.
func TestReturnableOfAWindow(t *testing.T) {
	t.Parallel()
	const second = 1_000_000
	windows := buckettest.FixedWindow(7, 10*time.Second, 21, 3*second)
	for name, test := range map[string]struct {
		ahead   bucket.Ahead
		ts, now int64
		want    float64
	}{
		"AtOnce":                 {bucket.Ahead{Taken: 10, Left: 4, TS: 3 * second}, 3 * second, 4 * second, 4},
		"AtTheEnd":               {bucket.Ahead{Taken: 10, Left: 4, TS: 3 * second}, 3 * second, 13*second - 1, 4},
		"AllOfIt":                {bucket.Ahead{Taken: 21, Left: 21, TS: 3 * second}, 3 * second, 13*second - 1, 21},
		"InTheNext":              {bucket.Ahead{Taken: 21, Left: 21, TS: 3 * second}, 3 * second, 13 * second, 0},
		"TheRowIsInTheNext":      {bucket.Ahead{Taken: 21, Left: 21, TS: 3 * second}, 13 * second, 13*second - 1, 0},
		"TakenUnderALargerLimit": {bucket.Ahead{Taken: 30, Left: 30, TS: 3 * second}, 3 * second, 13 * second, 0},
		"TakenInsideOfAWindow":   {bucket.Ahead{Taken: 10, Left: 4, TS: 5 * second}, 5 * second, 13*second - 1, 4},
	} {
		terms, ahead := test.ahead.Returning(windows)
		require.InDelta(t, test.want, ahead.Returnable(&terms, test.ts, test.now), 0, name)
		s := ahead.Return(&terms, bucket.State{Value: 1, TS: test.ts}, test.now)
		require.Equal(t, bucket.State{Value: min(21, 1+test.want), TS: test.ts}, s, name)
	}
	tokens := buckettest.TokenBucket(1, time.Second, 100)
	ahead := bucket.Ahead{Taken: 10, Left: 4, TS: 5}
	terms, same := ahead.Returning(tokens)
	require.Equal(t, tokens, terms)
	require.Equal(t, ahead, same)
}

func TestTheSameRowUnderOtherTerms(t *testing.T) {
	t.Parallel()
	slow, fast := buckettest.TokenBucket(1, time.Second, 100), buckettest.TokenBucket(120, time.Minute, 50)
	terms, ok := bucket.Under(slow, fast)
	require.True(t, ok)
	require.InDelta(t, 50, terms.Capacity, 0)
	require.InDelta(t, 2, terms.Rate, 1e-9)
	windows := buckettest.FixedWindow(7, 10*time.Second, 21, 0)
	for _, other := range []bucket.Terms{slow, windows} {
		_, ok = bucket.Under(windows, other)
		require.False(t, ok)
	}
	_, ok = bucket.Under(slow, windows)
	require.False(t, ok)
}

// The row of a bucket holds less by the tokens that processes may have prefetched, which is half of the capacity at most.
func TestTheRowHoldsLessByThePrefetchableTokens(t *testing.T) {
	t.Parallel()
	row, enough := bucket.RowCapacity(10, 1, 1000, 4000)
	require.True(t, enough)
	require.InDelta(t, 6, row, 0)
	_, enough = bucket.RowCapacity(10, 1, 1000, 5001)
	require.False(t, enough)
}
