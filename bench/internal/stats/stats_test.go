package stats_test

import (
	"math"
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
	tests := []struct {
		name   string
		values []int
		p      float64
		want   int
	}{
		{"OfNothingIsZero", nil, 50, 0},
		{"OfOneValueIsThatValue", []int{7}, 99, 7},
		{"TheMiddle", []int{1, 2, 3}, 50, 2},
		{"TheLowerOfTwoInTheMiddle", []int{1, 2, 3, 4}, 50, 2},
		{"P50OfAHundred", hundred, 50, 50},
		{"P99OfAHundred", hundred, 99, 99},
		{"TheLeast", hundred, 0, 1},
		{"TheMost", hundred, 100, 100},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			require.Equal(t, test.want, stats.Percentile(test.values, test.p))
		})
	}
}

func TestSpread(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name   string
		values []float64
		want   stats.Spread
	}{
		{"OfOneRound", []float64{4}, stats.Spread{Median: 4, Low: 4, High: 4, Min: 4, Max: 4}},
		{"OfAnOddNumberInAnyOrder", []float64{9, 1, 5}, stats.Spread{Median: 5, Low: 1, High: 9, Min: 1, Max: 9}},
		{"OfAnEvenNumberIsTheMeanOfTheMiddle", []float64{4, 1, 2, 9}, stats.Spread{Median: 3, Low: 1, High: 4, Min: 1, Max: 9}},
		{"TheMiddleHalfLeavesOutABusyMoment", []float64{10, 11, 2, 12, 13, 90, 12, 11}, stats.Spread{Median: 11.5, Low: 10, High: 12, Min: 2, Max: 90}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			require.Equal(t, test.want, stats.Of(test.values))
		})
	}
	t.Run("OfNothingIsUnknown", func(t *testing.T) {
		t.Parallel()
		require.True(t, math.IsNaN(stats.Of(nil).Median))
	})
	t.Run("OfSomethingUnknownIsUnknown", func(t *testing.T) {
		t.Parallel()
		require.True(t, math.IsNaN(stats.Of([]float64{1, math.NaN(), 2}).Median))
	})
	t.Run("LeavesTheRoundsInTheirOrder", func(t *testing.T) {
		t.Parallel()
		values := []float64{3, 1, 2}
		stats.Of(values)
		require.Equal(t, []float64{3, 1, 2}, values)
	})
}

func TestRatios(t *testing.T) {
	t.Parallel()
	t.Run("CompareWithinARound", func(t *testing.T) {
		t.Parallel()
		// The second round ran on a machine half as fast. The ratio of the medians would be 1.5.
		got := stats.Ratios([]float64{200, 100, 300}, []float64{100, 50, 200})
		require.Equal(t, stats.Of([]float64{2, 2, 1.5}), got)
	})
	t.Run("ToNothingAreUnknown", func(t *testing.T) {
		t.Parallel()
		require.True(t, math.IsNaN(stats.Ratios([]float64{1}, []float64{0}).Median))
		require.True(t, math.IsNaN(stats.Ratios(nil, nil).Median))
	})
}
