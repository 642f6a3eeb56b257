package buckettest

import "github.com/pgratelimit/pgratelimit/internal/engine/bucket"

// shifts are windows of seven hours and of eight, in turn.
type shifts struct{}

const hour = 60 * Minute

// Begin implements bucket.Windows.
func (shifts) Begin(i int64) int64 { return (i>>1*15 + i&1*7) * hour }

// Index implements bucket.Windows.
func (s shifts) Index(at int64) int64 {
	const both = 15 * hour
	i := (at - (at%both+both)%both) / both * 2
	if at >= s.Begin(i+1) {
		i++
	}
	return i
}

func (shifts) String() string { return "shifts" }

// Shifts draws the terms of a policy over windows whose lengths differ.
func Shifts(src Source) bucket.Terms {
	rate := float64(1 + src.Pick(20))
	return bucket.Terms{
		Kind: bucket.Steps{}, Capacity: rate, Rate: rate, Step: hour, Steps: 1, MaxDebt: rate, Reserves: true,
		Windows: shifts{},
	}
}
