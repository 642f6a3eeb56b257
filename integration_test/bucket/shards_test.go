package bucket_test

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
)

// TestRowsKeepTheirPromises checks the invariants with calls on random rows; FuzzTakeRows checks them with hostile ones.
func TestRowsKeepTheirPromises(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		src := shrinking{t}
		terms := buckettest.Over(buckettest.One(src, buckettest.Everyday, buckettest.Extreme, buckettest.Dyadic)(src), buckettest.One[int32](src, 2, 4, 8, 64))
		rows, now := rowsOf(src, terms)
		lowest := buckettest.One(src, 0, 0, -terms.MaxOwed)
		most, room := terms.Capacity-lowest, bucket.Rows(rows).Tokens(&terms, now)
		cost := max(0, buckettest.One(src, most, most*src.Unit(), most*src.Unit(), room, math.Nextafter(room, math.Inf(1))))
		if buckettest.Possible(terms, cost, lowest) {
			t.Logf("%v of %+v, at least %v to remain, on %+v at %d", cost, terms, lowest, rows, now)
			rowsKeep(t, terms, rows, now, cost, lowest)
		}
		likeOneRow(t, terms, rows[0], now, cost, lowest)
	})
}

// rowsKeep checks the invariants of a take from several rows together.
func rowsKeep(t require.TestingT, terms bucket.Terms, rows []bucket.State, now int64, cost, lowest float64) {
	sum := bucket.Rows(rows).Tokens(&terms, now)
	require.LessOrEqual(t, sum, terms.Capacity, "together no more than the capacity")
	require.LessOrEqual(t, sum, bucket.Rows(rows).Tokens(&terms, now+terms.Step), "time takes nothing away")

	wait := bucket.Rows(rows).Wait(&terms, now, cost, lowest).Microseconds()
	require.GreaterOrEqual(t, wait, int64(0))
	require.LessOrEqual(t, wait, bucket.Horizon)
	fixed := buckettest.FixClocks(terms, rows, now) // as they will be by then
	if at := now + wait; wait > 0 && wait < bucket.Horizon && at <= bucket.MaxInstant {
		require.True(t, bucket.Rows(slices.Clone(fixed)).Take(&terms, at, cost, lowest), "allowed after the wait")
		require.False(t, bucket.Rows(slices.Clone(fixed)).Take(&terms, at-1, cost, lowest), "not before it")
	}

	next := slices.Clone(rows)
	allowed := bucket.Rows(next).Take(&terms, now, cost, lowest)
	require.Equal(t, sum-cost >= lowest, allowed, "refused only when they are short together")
	require.Equal(t, allowed, wait == 0)
	if !allowed {
		require.Equal(t, rows, next, "a refusal changes nothing")
		return
	}
	require.Equal(t, sum-cost, bucket.Rows(next).Tokens(&terms, now), "nothing is lost, and nothing made")
	row := terms.OfShard()
	for i := range next {
		require.Equal(t, next[0].Value, next[i].Value, "the rows are even")
		require.GreaterOrEqual(t, next[i].TS, fixed[i].TS, "no instant is credited twice")
		require.False(t, row.FromFuture(next[i], now), "a wrong clock is put right")
	}
}

// likeOneRow checks that rows which are even decide as one does, to the last bit and the last microsecond.
func likeOneRow(t require.TestingT, terms bucket.Terms, row bucket.State, now int64, cost, lowest float64) {
	row.Value *= float64(terms.Shards)
	rows := evenly(row, terms.Shards)
	require.Equal(t, buckettest.Tokens(terms, terms.FixClock(row, now), now), bucket.Rows(rows).Tokens(&terms, now))
	for _, cost := range []float64{terms.Capacity, terms.Capacity / 3, cost} {
		require.Equal(t, buckettest.Wait(terms, row, now, cost, lowest), bucket.Rows(rows).Wait(&terms, now, cost, lowest))
		next, taken := buckettest.Take(terms, row, now, cost, lowest)
		rows := slices.Clone(rows)
		require.Equal(t, taken, bucket.Rows(rows).Take(&terms, now, cost, lowest))
		require.Equal(t, evenly(next, terms.Shards), rows)
	}
}

// FuzzTakeRows checks the invariants with one call on rows of two kinds.
func FuzzTakeRows(f *testing.F) {
	const second, now = int64(1e6), opening
	f.Add(false, 9.0, 60*second, 9.0, 1e12, int64(0), uint8(3), 1.0, now, 0.0, now-5, now, 3.0, false)
	f.Add(false, 1.0, second, 0.8, 0.0, int64(0), uint8(3), 0.1, now, 0.1, now, now, 0.8, false)
	f.Add(false, 1.0, second, 0.1, 0.7, int64(0), uint8(6), -0.01, now, 0.001, now-60, now, 0.3, true)
	f.Add(true, 7.0, 3600*second, 21.0, 7.0, now+1, uint8(1), -3.5, now-1, 10.5, now-1, now, 7.0, true)
	f.Add(true, 1e-9, int64(1), 1e6, 0.0, int64(0), uint8(6), 0.0, now, 1e6, bucket.MinInstant, now, 1e6, false)
	f.Add(false, 1e12, century, 1e12, 1e12, int64(0), uint8(5), -1e12, bucket.MaxInstant, 1e12, now, now, 1e12, true)
	f.Fuzz(func(t *testing.T, fixed bool, rate float64, period int64, capacity, maxOwed float64, start int64, exponent uint8,
		value float64, ts int64, otherValue float64, otherTS, now int64, cost float64, reserve bool,
	) {
		const widest = 1e300 // the rows of a bucket have to add up
		terms, ok := fuzzed(fixed, rate, period, capacity, maxOwed, start)
		if !ok || !(math.Abs(value) < widest && math.Abs(otherValue) < widest) {
			return
		}
		terms.Shards = 1 << (exponent % 7)
		lowest := 0.0
		if reserve {
			lowest = -maxOwed
		}
		if !buckettest.Possible(terms, cost, lowest) {
			return
		}
		rows := make([]bucket.State, terms.Shards)
		for i := range rows {
			rows[i] = bucket.State{Value: value, TS: min(max(ts, bucket.MinInstant), bucket.MaxInstant)}
			if i%3 == 1 {
				rows[i] = bucket.State{Value: otherValue, TS: min(max(otherTS, bucket.MinInstant), bucket.MaxInstant)}
			}
		}
		now = min(max(now, terms.Phase), bucket.MaxInstant)
		if len(rows) > 1 {
			rowsKeep(t, terms, rows, now, cost, lowest)
		}
		if math.Abs(rows[0].Value) > 1e-200 { // whose shares are exact
			likeOneRow(t, terms, rows[0], now, cost, lowest)
		}
	})
}

func TestACreditGoesToTheRowsThatHaveRoom(t *testing.T) {
	t.Parallel()
	const now = opening
	wide := buckettest.Over(buckettest.TokenBucket(4, time.Second, 8), 4)
	for name, test := range map[string]struct {
		rows         []bucket.State
		amount, most float64
		values       []float64
	}{
		"EvenlyWhereAllHaveRoom":      {[]bucket.State{{Value: 0, TS: now}, {Value: -1, TS: now}, {Value: 0.5, TS: now}, {Value: 1, TS: now}}, 2, 0, []float64{0.5, -0.5, 1, 1.5}},
		"TheRestWhereThereIsMore":     {[]bucket.State{{Value: 2, TS: now}, {Value: 1.75, TS: now}, {Value: 0, TS: now}, {Value: 2, TS: now}}, 2, 0, []float64{2, 2, 1.75, 2}},
		"FullIsFullWithWhatArrived":   {[]bucket.State{{Value: 0, TS: now - minute}, {Value: 0, TS: now}, {Value: 2, TS: now}, {Value: 2, TS: now}}, 2, 0, []float64{0, 2, 2, 2}},
		"NoMoreThanTheCapacity":       {[]bucket.State{{Value: 2, TS: now}, {Value: 1, TS: now}, {Value: 2, TS: now}, {Value: 2, TS: now}}, 8, 0, []float64{2, 2, 2, 2}},
		"AsFarAsItWasWhenItWasTaken":  {[]bucket.State{{Value: 2, TS: now}, {Value: 1, TS: now}, {Value: 2, TS: now}, {Value: 2, TS: now}}, 4, 12, []float64{2.75, 2.75, 2.75, 2.75}},
		"WhatIsAboveTheCapacityStays": {[]bucket.State{{Value: 5, TS: now}, {Value: 1, TS: now}, {Value: 2, TS: now}, {Value: 2, TS: now}}, 1, 0, []float64{5, 2, 2, 2}},
	} {
		before := slices.Clone(test.rows)
		bucket.Rows(test.rows).Credit(&wide, now, test.amount, test.most, math.MaxInt64)
		for i, s := range test.rows {
			require.Equal(t, bucket.State{Value: test.values[i], TS: before[i].TS}, s, "%s: row %d of %v", name, i, test.rows)
		}
	}
}
