package ahead

import "github.com/pgratelimit/pgratelimit/internal/bucket"

const (
	// ofRow and ofCapacity bound the tokens that one process prefetches in one decision, so that other processes get some. They are
	// shares of the tokens in the row and of its capacity.
	ofRow, ofCapacity = 0.25, 0.125
	// usedUpSoon is the share of Prefetch within which the tokens are used up if more are taken the next time. Twice
	// of that is well within Prefetch, so that at a steady pace none are left over.
	usedUpSoon = 8
)

// pace is how many tokens a process prefetches of one bucket, before the bounds.
type pace float64

// next sets how many tokens are prefetched in a decision that comes gap microseconds after the one before it. It doubles while those were
// used up soon, and halves when they were not within half of the time.
func (p *pace) next(t *bucket.Terms, gap int64, cost float64) {
	switch {
	case gap < t.Prefetch/usedUpSoon:
		*p = max(2**p, pace(cost))
	case gap > t.Prefetch/2:
		*p /= 2
	}
	*p = min(*p, pace(t.Capacity*ofCapacity))
}

// ahead returns how many tokens to prefetch from a row with that value, in addition to the tokens asked. It returns 0 if that would
// not pay one more call for cost, or if the row is nearly empty.
func (p pace) ahead(row, asked, cost float64) float64 {
	ahead := min(float64(p), (row-asked)*ofRow)
	if !(ahead >= cost) {
		return 0
	}
	return ahead
}
