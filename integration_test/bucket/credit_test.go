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

// TestACreditIsWorthTheSameLater compares two ways to credit: a credit leaves TS unchanged, and the other first brings the bucket
// to the present. At every later instant both give the same value, also under another rate, capacity and kind, in effect for the
// older TS from the start.
func TestACreditIsWorthTheSameLater(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		src := shrinking{t}
		draw := buckettest.One(src, buckettest.Everyday, buckettest.Dyadic)
		terms := buckettest.Over(draw(src), buckettest.One[int32](src, 1, 1, 2, 8))
		shard, period := terms.OfShard(), buckettest.Period(terms)
		now := opening + int64(src.Unit()*float64(century))
		rows := make([]bucket.State, terms.Shards)
		for i := range rows {
			rows[i] = bucket.State{
				Value: buckettest.One(src, 0, shard.Capacity, shard.Capacity*src.Unit(), -shard.MaxOwed*src.Unit()),
				TS:    shard.Begin(now - int64(src.Unit()*2*float64(period)) + buckettest.One(src, 0, 0, 0, minute, 2*minute+period)),
			}
		}
		before, amount := slices.Clone(rows), src.Unit()*buckettest.One(src, 1, 0.1, 2)*(terms.Capacity+1)
		bucket.Rows(rows).Credit(&terms, now, amount, 0, math.MaxInt64)

		tolerance := 1e-9 * (terms.Capacity + terms.MaxOwed + amount + 1)
		require.InDelta(t, min(terms.Capacity, bucket.Rows(before).Tokens(&terms, now)+amount), bucket.Rows(rows).Tokens(&terms, now), tolerance)
		for i, s := range rows {
			fixed := shard.FixClock(before[i], now)
			require.Equal(t, fixed.TS, s.TS, "no time is credited")
			require.GreaterOrEqual(t, s.Value, before[i].Value)
			require.LessOrEqual(t, s.Value, max(shard.Capacity, before[i].Value))
			given := s.Value - before[i].Value
			present := bucket.State{Value: min(shard.Capacity, buckettest.Tokens(shard, fixed, now)+given), TS: max(fixed.TS, shard.Begin(now))}
			later := now + int64(src.Unit()*3*float64(period))
			require.InDelta(t, buckettest.Tokens(shard, present, later), buckettest.Tokens(shard, s, later), tolerance)

			changed := draw(src)
			want := min(changed.Capacity, buckettest.Tokens(changed, fixed, later)+given)
			require.LessOrEqual(t, buckettest.Tokens(changed, s, later), want+tolerance+1e-9*changed.Capacity, "no more than a credit at that moment")
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
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			before := slices.Clone(test.rows)
			bucket.Rows(test.rows).Credit(&wide, now, test.amount, test.most, math.MaxInt64)
			for i, s := range test.rows {
				require.Equal(t, bucket.State{Value: test.values[i], TS: before[i].TS}, s, "row %d of %v", i, test.rows)
			}
		})
	}
}
