package ratelimit

import (
	"crypto/sha256"
	"encoding/binary"
	"math/rand/v2"
	"time"
)

// Spread returns a random duration from 0 up to, and not including, span: 0 when span is not above 0. Add
// it to a RetryAfter or a ReadyAt that many share, so that they do not all come back at once. Only
// add: whoever comes sooner is refused.
func Spread(span time.Duration) time.Duration {
	if span <= 0 {
		return 0
	}
	return rand.N(span)
}

// SpreadFor is Spread with a memory: share of the span, from 0 to 1, is decided by the identity and only
// the rest by chance. A client keeps its place among the others then, from call to call and from process to
// process, and different clients get different places.
//
//	offset = span * (share * place(identity) + (1 - share) * chance)        place, chance in [0, 1)
//
// With a share of 1 nothing is left to chance, with 0 everything is. A share out of range, or not a
// number, counts as the nearest of the two, or as 0.
func SpreadFor(identity string, span time.Duration, share float64) time.Duration {
	if span <= 0 {
		return 0
	}
	if !(share > 0) {
		return Spread(span)
	}
	fixed := min(time.Duration(float64(span)*min(share, 1)), span)
	own := min(time.Duration(place(identity)*float64(fixed)), max(fixed-1, 0)) // rounding may reach fixed
	return own + Spread(span-fixed)
}

// place returns a number in [0, 1) that only depends on identity.
func place(identity string) float64 {
	sum := sha256.Sum256([]byte(identity))
	return float64(binary.BigEndian.Uint64(sum[:8])>>11) / (1 << 53)
}
