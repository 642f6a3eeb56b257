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
	perHour := buckettest.TokenBucket(6, time.Hour, 6)
	for name, test := range map[string]struct {
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
	} {
		before, after := perHour, perHour
		before.Capacity, after.Capacity = test.before, test.after
		terms := changeAt(from, before, after, test.change)
		got := terms.Settle(bucket.State{Value: test.value, TS: from - 1})
		require.Equal(t, from, got.TS, name)
		require.InDelta(t, test.want, got.Value, 1e-5, name)
		require.Equal(t, got, terms.Settle(got), "%s: settled once", name)
	}
}

func TestOnlyAResetChangesTheNumberOfRows(t *testing.T) {
	t.Parallel()
	one := buckettest.TokenBucket(80, time.Hour, 80)
	eight, more := buckettest.Over(one, 8), buckettest.Over(buckettest.TokenBucket(80, time.Hour, 160), 8)
	all := []bucket.Change{bucket.Keep, bucket.Scale, bucket.Add, bucket.Reset}
	for name, test := range map[string]struct {
		before, after bucket.Terms
		byRow         []bucket.Change
	}{
		"MoreRows":                     {one, eight, []bucket.Change{bucket.Reset}},
		"FewerRows":                    {eight, one, []bucket.Change{bucket.Reset}},
		"ALargerCapacityOfSeveralRows": {eight, more, []bucket.Change{bucket.Scale, bucket.Add, bucket.Reset}},
		"ASmallerCapacity":             {more, eight, all},
		"ALargerCapacityOfOneRow":      {one, buckettest.TokenBucket(80, time.Hour, 160), all},
	} {
		var byRow []bucket.Change
		for _, change := range all {
			if change.IsByRow(&test.before, &test.after) {
				byRow = append(byRow, change)
			}
		}
		require.Equal(t, test.byRow, byRow, name)
	}
}
