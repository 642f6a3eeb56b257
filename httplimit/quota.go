package httplimit

import (
	"math"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// maxInteger is the largest Integer of a structured field.
const maxInteger = 999_999_999_999_999

// schedule is how the tokens of a limit arrive.
type schedule struct {
	rate   float64
	period time.Duration
	fixed  bool // at once, at the start of each window
}

func scheduleOf(limit ratelimit.Limit) schedule {
	switch p := limit.Policy().(type) {
	case ratelimit.TokenBucket:
		return schedule{p.Rate, p.Period, false}
	case *ratelimit.TokenBucket:
		return schedule{p.Rate, p.Period, false}
	case ratelimit.FixedWindow:
		return schedule{p.Rate, p.Period, true}
	case *ratelimit.FixedWindow:
		return schedule{p.Rate, p.Period, true}
	}
	return schedule{}
}

// quota returns the rate as a whole number of tokens in whole seconds: the policy's own where they are
// whole, and otherwise the smallest multiple of both that is. Where none is found soon, the tokens
// are rounded down, to 1 at least.
func (s schedule) quota() (tokens, seconds int64) {
	us := max(s.period.Microseconds(), 1)
	const second = int64(time.Second / time.Microsecond)
	periods := second / gcd(us, second) // in the fewest whole seconds
	rate, span := s.rate*float64(periods), us/gcd(us, second)
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

// effectiveWindow returns for how many seconds the client can use no more than what is left of a limit:
// until its request would be allowed when it was refused, until the window ends for a fixed window, and for
// a token bucket the time that what is left takes to arrive, or the next whole token when none is left.
func effectiveWindow(state ratelimit.State, at time.Time) int64 {
	if !state.Allowed {
		return max(seconds(state.RetryAfter), 1)
	}
	s := scheduleOf(state.Limit)
	if s.fixed {
		return max(seconds(untilWindowEnds(state, at)), 1)
	}
	left := math.Floor(state.Remaining)
	if left == 0 {
		left = 1 - state.Remaining
	}
	return max(integer(math.Ceil(left*s.period.Seconds()/s.rate)), 1)
}

// untilWindowEnds returns how long the current window of a fixed window's bucket lasts from at, the
// instant of the decision. Where nothing was ever taken, that does not show: then it is a period.
func untilWindowEnds(state ratelimit.State, at time.Time) time.Duration {
	s := scheduleOf(state.Limit)
	next := min(state.Limit.Capacity(), state.Value.Tokens+s.rate) // what the bucket holds once it has ended
	wait, err := state.Value.RetryAfter(at, max(next, 0))
	if err != nil || wait <= 0 || wait > s.period {
		return s.period
	}
	return wait
}
