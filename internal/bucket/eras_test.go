package bucket_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
)

// changeAt returns the terms that hold after one change.
func changeAt(from int64, before, after bucket.Terms, change bucket.Change) bucket.Terms {
	return bucket.NewEras([]bucket.Era{{Terms: before}, {From: from, Terms: after, Change: change}}).Holding(from)
}

func TestAChangeDoesWithTheTokensWhatItSays(t *testing.T) {
	t.Parallel()
	const from = 1000 * minute
	perHour := func(capacity float64) bucket.Terms { return buckettest.TokenBucket(capacity, time.Hour, capacity) }
	tests := map[string]struct {
		value         float64 // at the change
		before, after float64 // the capacities
		change        bucket.Change
		want          float64
	}{
		"keep":                   {1.8, 3, 60, bucket.Keep, 1.8},
		"scale":                  {1.8, 3, 60, bucket.Scale, 36},
		"add":                    {1.8, 3, 60, bucket.Add, 58.8},
		"reset":                  {1.8, 3, 60, bucket.Reset, 60},
		"scale, full":            {500, 500, 200, bucket.Scale, 200},
		"keep, lowered":          {400, 500, 200, bucket.Keep, 200},
		"add, raised":            {200, 500, 900, bucket.Add, 600},
		"add, lowered":           {200, 500, 100, bucket.Add, -200},
		"scale, owing":           {-2.75, 6, 3, bucket.Scale, -1.375},
		"keep, owing":            {-2.75, 6, 3, bucket.Keep, -2.75},
		"reset, owing":           {-2.75, 6, 3, bucket.Reset, 3},
		"keep, full stays full":  {3, 3, 60, bucket.Keep, 60},
		"add, owing":             {-2, 6, 10, bucket.Add, 2},
		"scale, from no tokens":  {-1, 0, 10, bucket.Scale, -1},
		"keep, nothing but owed": {-1, 10, 0, bucket.Keep, -1},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			before, after := perHour(6), perHour(6)
			before.Capacity, after.Capacity = test.before, test.after
			terms := changeAt(from, before, after, test.change)
			got := terms.Settle(bucket.State{Value: test.value, TS: from - 1})
			require.Equal(t, from, got.TS)
			require.InDelta(t, test.want, got.Value, 1e-5)
			require.Equal(t, got, terms.Settle(got), "settled once")
		})
	}
}

func TestTimeBeforeAChangeCountsUnderTheTermsBefore(t *testing.T) {
	t.Parallel()
	const from = 1000 * minute
	slow, fast := buckettest.TokenBucket(10, time.Minute, 10), buckettest.TokenBucket(1000, time.Minute, 1000)
	terms := changeAt(from, slow, fast, bucket.Keep)
	empty := bucket.State{Value: 0, TS: from - minute/2}

	got := terms.Settle(empty)
	require.Equal(t, bucket.State{Value: 5, TS: from}, got, "half a minute at the old rate, and not at the new one")
	require.InDelta(t, 5+1000.0/60, buckettest.Tokens(terms, got, from+1_000_000), 1e-9)
}

func TestAWindowThatBecomesABucketGivesNothingAgain(t *testing.T) {
	t.Parallel()
	window := buckettest.FixedWindow(10, time.Hour, 10, 0)
	begin := window.Begin(1000 * minute)
	from := begin + 59*minute
	tests := map[string]struct{ before, after bucket.Terms }{
		"to a bucket": {window, buckettest.TokenBucket(10, time.Hour, 10)},
		"to a window": {buckettest.TokenBucket(10, time.Hour, 10), window},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			terms := changeAt(from, test.before, test.after, bucket.Keep)
			spent := bucket.State{Value: 0, TS: test.before.Begin(from - 1)}
			got := terms.Settle(spent)
			require.InDelta(t, 0, got.Value, 1e-3)
			require.InDelta(t, 0, buckettest.Tokens(terms, got, from+1_000_000), 1e-2, "a second later")
			left, allowed := buckettest.Take(terms, got, from+1_000_000, 0, 0)
			require.True(t, allowed)
			require.GreaterOrEqual(t, left.TS, from, "what is decided in an era is of that era")
		})
	}
}

func TestTheWaitEndsWhenTheTokensAreThereInAStepThatTheEraBeganIn(t *testing.T) {
	t.Parallel()
	window := buckettest.FixedWindow(10, time.Hour, 10, 0)
	begin := window.Begin(1000 * minute)
	from := begin + 20*minute
	terms := changeAt(from, buckettest.FixedWindow(5, time.Hour, 5, 0), window, bucket.Keep)
	state := terms.Settle(bucket.State{Value: 0, TS: begin})
	for _, now := range []int64{from, from + minute, begin + 59*minute} {
		wait := buckettest.Wait(terms, state, now, 1, 0).Microseconds()
		require.Equal(t, begin+60*minute, now+wait)
		require.InDelta(t, 10, buckettest.Tokens(terms, state, now+wait), 0)
		require.Zero(t, buckettest.Tokens(terms, state, now+wait-1))
	}
}

func TestOnlyAResetChangesTheNumberOfRows(t *testing.T) {
	t.Parallel()
	one := buckettest.TokenBucket(80, time.Hour, 80)
	eight, more := buckettest.Over(one, 8), buckettest.Over(buckettest.TokenBucket(80, time.Hour, 160), 8)
	tests := map[string]struct {
		before, after bucket.Terms
		byRow         []bucket.Change
	}{
		"MoreRows":                     {one, eight, []bucket.Change{bucket.Reset}},
		"FewerRows":                    {eight, one, []bucket.Change{bucket.Reset}},
		"ALargerCapacityOfSeveralRows": {eight, more, []bucket.Change{bucket.Scale, bucket.Add, bucket.Reset}},
		"ASmallerCapacity":             {more, eight, []bucket.Change{bucket.Keep, bucket.Scale, bucket.Add, bucket.Reset}},
		"ALargerCapacityOfOneRow":      {one, buckettest.TokenBucket(80, time.Hour, 160), []bucket.Change{bucket.Keep, bucket.Scale, bucket.Add, bucket.Reset}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var byRow []bucket.Change
			for _, change := range []bucket.Change{bucket.Keep, bucket.Scale, bucket.Add, bucket.Reset} {
				if change.IsByRow(&test.before, &test.after) {
					byRow = append(byRow, change)
				}
			}
			require.Equal(t, test.byRow, byRow)
		})
	}
}

// TestAResetFillsTheBucketInAnotherNumberOfRows decides on rows of the number before the change and of the number after it.
func TestAResetFillsTheBucketInAnotherNumberOfRows(t *testing.T) {
	t.Parallel()
	const from = 1000 * minute
	one := buckettest.TokenBucket(80, time.Hour, 80)
	for name, rows := range map[string][2]int32{"More": {1, 8}, "Fewer": {8, 2}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			terms := changeAt(from, buckettest.Over(one, rows[1]), buckettest.Over(one, rows[0]), bucket.Reset)
			asks := []bucket.Ask{{Key: bucket.Key{Name: "limit"}, Terms: terms.Eras.Holding(from - 1), Cost: 80}}
			require.Equal(t, 8, asks[0].RowCount(), "the rows of all eras, because any of them may be in effect")
			memory := bucket.NewMemory()
			require.True(t, memory.Take(asks, from-1)[0].Allowed)
			require.False(t, memory.Take(asks, from-1)[0].Allowed)
			require.True(t, memory.Take(asks, from)[0].Allowed)
			require.False(t, memory.Take(asks, from)[0].Allowed)
		})
	}
}
