package ratelimit

import (
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/words"
)

// SlidingWindow gives never more than Rate tokens in any span of a Period, wherever the span begins.
//
//	tokens = Rate - what was taken in the last Period
//
// What was taken is counted in Slices of the Period, and a slice counts until all of it is more than a Period ago. So a token
// comes back up to Period / Slices later than a Period after it was taken, and never earlier. A refusal is not counted.
// RetryAfter is exact. A rollback gives back what its transaction took.
//
// There are no reservations, as tokens cannot be had ahead of time: Reserve returns ErrNoReservations. Credit gives back
// what was taken last, Refund what was taken in the slice of its instant, as long as that counts. Charge counts as taken now. When the
// clock steps back by up to a minute, what is taken counts as taken at the latest instant that the row has seen.
//
// When the policy of a limit in use is changed, what was taken goes on to count: in another Period, and with other Slices, up
// to the end of the slice it was taken in. In a longer Period may count again what had fallen out of the shorter one. What a bucket of another kind lacked of the Rate counts as taken when that was
// last written, and what a [FixedWindow] or a [CalendarWindow] has given when their window began, which may be more than a Period
// ago; where a rule changes the policy, at the instant of the change.
type SlidingWindow struct {
	// Rate is the most that is given in any Period, and so the largest cost: from 1e-9 to 1e12 tokens.
	Rate float64
	// Period is the length of the window: whole microseconds, up to 100 years.
	Period time.Duration
	// Slices is how many parts the Period is counted in, from 1 to 128. With more of them tokens come back sooner after a
	// Period, and the row is longer: by up to 8 bytes for each. The Period has to be a whole number of microseconds for each.
	// Defaults to the largest number up to 60 with which it is, which is 60 for whole minutes and for most other periods.
	Slices int
}

// String returns the policy in words, as in "never more than 100 in any minute".
func (p SlidingWindow) String() string {
	return "never more than " + words.InAny(p.Rate, p.Period)
}

func (p SlidingWindow) compile() (bucket.Terms, error) {
	t, err := compile(p.Rate, p.Period, 0, NoReservations, 1)
	if err != nil {
		return bucket.Terms{}, err
	}
	us, slices := p.Period.Microseconds(), int64(p.Slices)
	if slices == 0 {
		slices = dividing(us)
	}
	if slices < 1 || slices > bucket.MaxSlices {
		return bucket.Terms{}, fmt.Errorf("its Slices is %d; it must be from 1 to %d, or 0 for %d", p.Slices, bucket.MaxSlices, dividing(us))
	}
	if us%slices != 0 {
		return bucket.Terms{}, fmt.Errorf("its Period of %v is no whole number of microseconds for each of %d Slices; leave out Slices for %d, or set it to a number that divides %d", p.Period, slices, dividing(us), us)
	}
	t.Step, t.Steps, t.Phase = us/slices, float64(slices), bucket.MinInstant
	t.Kind = bucket.Sliding{Slices: int32(slices)}
	return t, nil
}

// dividing returns the number of slices of a period of so many microseconds where the policy names none.
func dividing(us int64) int64 {
	for slices := int64(60); ; slices-- {
		if us%slices == 0 {
			return slices
		}
	}
}
