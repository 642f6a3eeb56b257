package bucket_test

import (
	"slices"

	"pgregory.net/rapid"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/bucket/buckettest"
)

const (
	opening = buckettest.Opening
	minute  = buckettest.Minute
	day     = buckettest.Day
	century = buckettest.Century
)

// shrinking makes rapid a source, so that what fails is shrunk to something short.
type shrinking struct{ *rapid.T }

// Pick returns a number from 0 up to n-1.
func (s shrinking) Pick(n int) int { return rapid.IntRange(0, n-1).Draw(s.T, "pick") }

// Unit returns a number from 0 to 1.
func (s shrinking) Unit() float64 {
	return float64(rapid.IntRange(0, 1<<20).Draw(s.T, "unit")) / (1 << 20)
}

// rowsOf draws rows as they may be found of a bucket that is spread over several, and a time.
func rowsOf(src shrinking, terms bucket.Terms) (rows []bucket.State, now int64) {
	shard, period := terms.OfShard(), buckettest.Period(terms)
	now = opening + int64(src.Unit()*float64(century))
	rows = make([]bucket.State, terms.Shards)
	for i := range rows {
		rows[i] = bucket.State{
			Value: buckettest.One(src, 0, shard.Capacity, shard.Capacity*src.Unit(), shard.Capacity*src.Unit(), -shard.MaxOwed, -shard.MaxOwed*src.Unit()),
			TS:    now - int64(src.Unit()*2*float64(period)/max(terms.Rate, 1)) + buckettest.One(src, 0, 0, 0, minute, 2*minute+period),
		}
	}
	return rows, now
}

// evenly returns the rows of a bucket that hold and gain as much as row does.
func evenly(row bucket.State, n int32) []bucket.State {
	return slices.Repeat([]bucket.State{{Value: row.Value / float64(n), TS: row.TS}}, int(n))
}
