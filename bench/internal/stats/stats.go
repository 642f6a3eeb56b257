// Package stats has the few statistics that a comparison of interleaved rounds needs. A figure that was not
// measured is NaN, and every number computed from it is NaN too.
package stats

import (
	"cmp"
	"math"
	"slices"
)

// Percentile returns the p-th percentile (0 to 100) of values in ascending order: the smallest value
// that p percent do not exceed (nearest rank). It returns 0 without values.
func Percentile[T cmp.Ordered](ascending []T, p float64) T {
	if len(ascending) == 0 {
		var none T
		return none
	}
	rank := int(math.Ceil(p / 100 * float64(len(ascending))))
	return ascending[min(max(rank, 1), len(ascending))-1]
}

// Spread is one figure over several rounds. The middle half of the rounds is from Low to High. More rounds make it more
// reliable, while the extremes only widen on a shared machine.
type Spread struct{ Low, Median, High float64 }

// Of returns the spread of values. The median of an even number is the mean of the middle two.
func Of(values []float64) Spread {
	if len(values) == 0 || slices.ContainsFunc(values, math.IsNaN) {
		return Spread{math.NaN(), math.NaN(), math.NaN()}
	}
	sorted := slices.Sorted(slices.Values(values))
	below, above := sorted[(len(sorted)-1)/2], sorted[len(sorted)/2]
	return Spread{Percentile(sorted, 25), below + (above-below)/2, Percentile(sorted, 75)}
}

// Ratios returns the spread of each round's ratio of the value to the baseline's value. The ratio of two
// medians would compare different rounds, in which the machine may have been busy.
func Ratios(values, baseline []float64) Spread {
	ratios := make([]float64, min(len(values), len(baseline)))
	for i := range ratios {
		ratios[i] = values[i] / baseline[i]
		if baseline[i] == 0 {
			ratios[i] = math.NaN()
		}
	}
	return Of(ratios)
}
