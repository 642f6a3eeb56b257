package stats_test

import (
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/bench/internal/stats"
)

func TestPercentile(t *testing.T) {
	t.Parallel()
	hundred := make([]int, 100)
	for i := range hundred {
		hundred[i] = i + 1
	}
	for _, test := range []struct {
		values []int
		p      float64
		want   int
	}{
		{nil, 50, 0},
		{[]int{7}, 99, 7},
		{[]int{1, 2, 3}, 50, 2},
		{[]int{1, 2, 3, 4}, 50, 2},
		{hundred, 50, 50},
		{hundred, 99, 99},
		{hundred, 0, 1},
		{hundred, 100, 100},
	} {
		require.Equal(t, test.want, stats.Percentile(test.values, test.p), "%v of %v", test.p, test.values)
	}
}

func TestSpread(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		values []float64
		want   stats.Spread
	}{
		{[]float64{4}, stats.Spread{Median: 4, Low: 4, High: 4}},
		{[]float64{9, 1, 5}, stats.Spread{Median: 5, Low: 1, High: 9}},
		{[]float64{4, 1, 2, 9}, stats.Spread{Median: 3, Low: 1, High: 4}},
		{[]float64{10, 11, 2, 12, 13, 90, 12, 11}, stats.Spread{Median: 11.5, Low: 10, High: 12}},
	} {
		before := slices.Clone(test.values)
		require.Equal(t, test.want, stats.Of(test.values))
		require.Equal(t, before, test.values, "the rounds keep their order")
	}
	require.True(t, math.IsNaN(stats.Of(nil).Median))
	require.True(t, math.IsNaN(stats.Of([]float64{1, math.NaN(), 2}).Median))
}

func TestRatios(t *testing.T) {
	t.Parallel()
	// The second round ran on a machine half as fast. The ratio of the medians would be 1.5.
	require.Equal(t, stats.Of([]float64{2, 2, 1.5}), stats.Ratios([]float64{200, 100, 300}, []float64{100, 50, 200}))
	require.True(t, math.IsNaN(stats.Ratios([]float64{1}, []float64{0}).Median))
	require.True(t, math.IsNaN(stats.Ratios(nil, nil).Median))
}
