package bucket

import "slices"

// mostUnits returns how many units, up to n, all buckets with enforced limits can give. The costs of the asks are the costs of a unit.
// decide decides on asks, and takes nothing.
func mostUnits(asks []Ask, n int, decide func(asks []Ask) []Answer) int {
	const most = 1 << 53 // float64 represents each of these numbers exactly
	tooMany := func(units int64) bool {
		for i, r := range decide(unitsOf(asks, int(units))) {
			if !r.Allowed && !asks[i].Unenforced {
				return true
			}
		}
		return false
	}
	return int(first(1, int64(min(n, most))+1, tooMany)) - 1
}

// unitsOf returns the asks for that many units; the costs of asks are the costs of one unit.
func unitsOf(asks []Ask, units int) []Ask {
	asks = slices.Clone(asks)
	for i := range asks {
		asks[i].Cost *= float64(units)
		asks[i].Asked *= float64(units)
	}
	return asks
}
