package httplimit

import (
	"math"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// maxInteger is the largest Integer of a structured field.
const maxInteger = 999_999_999_999_999

// schedule has the numbers of a limit that the fields tell.
type schedule struct{ ratelimit.Spec }

func scheduleOf(limit ratelimit.Limit) schedule { return schedule{limit.Spec()} }

// period returns the time in which Rate tokens arrive, and 0 if it has no fixed length.
func (s schedule) period() time.Duration {
	if s.Kind == ratelimit.KindCalendarWindow || s.Kind == ratelimit.KindConcurrency {
		return 0
	}
	return s.Period
}

// quota returns the rate as a whole number of tokens in whole seconds: the policy's own where they are
// whole, and otherwise the smallest multiple of both that is. Where none is found soon, the tokens
// are rounded down, to 1 at least. The seconds are 0 where there is no period.
func (s schedule) quota() (tokens, seconds int64) {
	if s.period() == 0 {
		return max(integer(s.Rate), 1), 0
	}
	us := max(s.period().Microseconds(), 1)
	const second = int64(time.Second / time.Microsecond)
	periods := second / gcd(us, second) // in the fewest whole seconds
	rate, span := s.Rate*float64(periods), us/gcd(us, second)
	times := int64(1)
	for ; times < 1000; times++ {
		if n := rate * float64(times); n >= 1 && n == math.Floor(n) {
			return integer(n), min(span*times, maxInteger)
		}
	}
	times = max(integer(math.Ceil(1/rate)), 1)
	return max(integer(rate*float64(times)), 1), integer(float64(span) * float64(times))
}

func gcd(a, b int64) int64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// integer returns n rounded down to what an Integer can say, from 0 up.
func integer(n float64) int64 {
	if !(n > 0) {
		return 0
	}
	return int64(min(n, maxInteger))
}

// seconds returns d in whole seconds, rounded up.
func seconds(d time.Duration) int64 {
	whole := int64(d / time.Second)
	if d%time.Second > 0 {
		whole++
	}
	return max(whole, 0)
}

// effectiveWindow returns t of the field RateLimit: a client that spreads the remaining tokens over t seconds is not
// refused. known is false for slots, because they are free when they are released, and for a calendar window from which
// nothing was taken.
func effectiveWindow(state ratelimit.State, at time.Time) (t int64, known bool) {
	s := scheduleOf(state.Limit)
	switch {
	case s.Kind == ratelimit.KindConcurrency:
		return 0, false
	case !state.Allowed: // until the request would be allowed
		return max(seconds(state.RetryAfter), 1), true
	}
	wait := s.period()
	switch s.Kind {
	case ratelimit.KindFixedWindow, ratelimit.KindCalendarWindow: // until the window ends
		if ends := untilMore(state, at, state.Value.Tokens+s.Rate); ends > 0 && (s.period() == 0 || ends < s.period()) {
			wait = ends
		}
	case ratelimit.KindSlidingWindow: // until there is one token more
		if more := untilMore(state, at, math.Floor(state.Remaining)+1); more > 0 {
			wait = more
		}
	default: // a token bucket: the time in which the tokens that are left arrive, or the next whole token
		quota, _ := s.quota()
		left := math.Floor(min(state.Remaining, float64(quota)))
		if left == 0 {
			left = 1 - state.Remaining
		}
		return max(integer(math.Ceil(left*s.period().Seconds()/s.Rate)), 1), true
	}
	return max(seconds(wait), 1), wait > 0
}

// untilMore returns how long after at, the instant of the decision, a bucket holds so many tokens, or its capacity: 0
// when it does already. Where nothing was ever taken from a window, its end does not show.
func untilMore(state ratelimit.State, at time.Time, tokens float64) time.Duration {
	wait, err := state.Value.RetryAfter(at, max(min(state.Limit.Capacity(), tokens), 0))
	if err != nil {
		return 0
	}
	return wait
}
