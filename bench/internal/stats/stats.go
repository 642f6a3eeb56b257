// Package stats has the few statistics that a comparison of interleaved rounds needs. A figure that was not
// measured is NaN, and every number computed from it is NaN too.
package stats

import (
	"cmp"
	"math"
	"slices"
)

// Percentile returns the p-th percentile, from 0 to 100, of values in ascending order: the smallest of them
// that p percent of all do not exceed (nearest rank). It returns the zero value when there are none.
func Percentile[T cmp.Ordered](ascending []T, p float64) T {
	if len(ascending) == 0 {
		var none T
		return none
	}
	rank := int(math.Ceil(p / 100 * float64(len(ascending))))
	return ascending[min(max(rank, 1), len(ascending))-1]
}

// Spread is what several rounds gave for one figure. The middle half of them is from Low to High, which more rounds make
// surer; the ends are wider the more rounds there are on a machine that others use as well.
type Spread struct {
	Median float64 `json:"median"`
	Low    float64 `json:"low"`  // the 25th percentile
	High   float64 `json:"high"` // the 75th
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// Of returns the spread of values. The median of an even number of them is the mean of the middle two.
func Of(values []float64) Spread {
	if len(values) == 0 || slices.ContainsFunc(values, math.IsNaN) {
		nan := math.NaN()
		return Spread{nan, nan, nan, nan, nan}
	}
	sorted := slices.Sorted(slices.Values(values))
	below, above := sorted[(len(sorted)-1)/2], sorted[len(sorted)/2]
	return Spread{
		Median: below + (above-below)/2,
		Low:    Percentile(sorted, 25), High: Percentile(sorted, 75),
		Min: sorted[0], Max: sorted[len(sorted)-1],
	}
}

// Known returns the spread, and nil when it was not measured: JSON has no number for that.
func (s Spread) Known() *Spread {
	if math.IsNaN(s.Median) {
		return nil
	}
	return &s
}

// Ratios returns the spread of a round's value over the baseline's value of the same round. That of two
// medians would compare rounds in which the machine may have been busy with something else.
func Ratios(values, baseline []float64) Spread {
	ratios := make([]float64, min(len(values), len(baseline)))
	for i := range ratios {
		ratios[i] = ratio(values[i], baseline[i])
	}
	return Of(ratios)
}

func ratio(value, baseline float64) float64 {
	if baseline == 0 {
		return math.NaN()
	}
	return value / baseline
}
