package buckettest

import (
	"math"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// Opening is when every story begins: the first instant of 2026-03-02, in microseconds since 1970.
const Opening = int64(1_772_409_600_000_000)

// Spans in microseconds.
const (
	Minute  = int64(60_000_000)
	Day     = 24 * 60 * Minute
	Century = 36525 * Day
)

// TokenBucket returns the terms of a token bucket: rate tokens arrive each period, up to capacity.
func TokenBucket(rate float64, period time.Duration, capacity float64) bucket.Terms {
	return bucket.Terms{
		Kind: bucket.Steps{}, Capacity: capacity, Rate: rate, Steps: float64(period.Microseconds()), Step: 1,
		Phase: bucket.MinInstant,
	}
}

// FixedWindow returns the terms of a fixed window, one of which begins at start.
func FixedWindow(rate float64, period time.Duration, capacity float64, start int64) bucket.Terms {
	step := period.Microseconds()
	return bucket.Terms{
		Kind: bucket.Steps{}, Capacity: capacity, Rate: rate, Steps: 1, Step: step,
		Phase: bucket.PhaseOf(start, step),
	}
}

// Valid reports whether there is a policy with the terms t. The tests of NewLimit show that it rejects all other
// policies.
func Valid(t bucket.Terms) bool {
	bounded := func(tokens float64) bool {
		return tokens == 0 || tokens >= bucket.MinTokens && tokens <= bucket.MaxTokens
	}
	period, longest := t.Steps*float64(t.Step), float64(bucket.MaxSpan.Microseconds())
	most := min(bucket.MaxTokens, t.Rate*(longest/period)) // what arrives within MaxSpan
	return t.Rate >= bucket.MinTokens && t.Rate <= bucket.MaxTokens && period <= longest &&
		bounded(t.Capacity) && bounded(t.MaxDebt) && t.Capacity <= most && t.MaxDebt <= most && t.Capacity+t.MaxDebt > 0
}

// Possible reports whether t can distinguish cost from 0, and can ever give it so that lowest remain, as all callers
// request.
func Possible(t bucket.Terms, cost, lowest float64) bool {
	return (cost == 0 || cost >= max(t.Capacity*bucket.MinCostShare, bucket.MinTokens)) && t.Capacity-cost >= lowest
}

// Period returns the length of a period in microseconds.
func Period(t bucket.Terms) int64 { return int64(t.Steps) * t.Step }

// Everyday draws the terms of a policy as programs have them.
func Everyday(src Source) bucket.Terms {
	rate := One(src, 1, 3, 5, 9, 10, 60, 70, 100, 1000, 40_000, 0.1, 1.0/3, 2.5)
	period := One(src, time.Microsecond, time.Millisecond, 16_667*time.Microsecond, 999_983*time.Microsecond,
		time.Second, 7*time.Second, time.Minute, time.Hour, 24*time.Hour, 7*24*time.Hour)
	return ofEitherKind(src, rate, period, One(src, rate, rate, rate, rate/3, rate/2, 2*rate, 7*rate, 3, 0),
		One(src, math.Inf(1), math.Inf(1), 0, 0, rate/2, 3, 0.2), Everyday)
}

// Extreme draws the terms of any policy, evenly over the orders of magnitude.
func Extreme(src Source) bucket.Terms {
	between := func(low, high float64) float64 { return low * math.Pow(high/low, src.Unit()) }
	period := time.Duration(between(1, float64(bucket.MaxSpan/time.Microsecond))) * time.Microsecond
	rate := between(bucket.MinTokens, bucket.MaxTokens)
	return ofEitherKind(src, rate, period,
		One(src, rate, 0, between(bucket.MinTokens, bucket.MaxTokens), bucket.MaxTokens, bucket.MinTokens),
		One(src, math.Inf(1), 0, between(bucket.MinTokens, bucket.MaxTokens), bucket.MaxTokens, bucket.MinTokens), Extreme)
}

// Dyadic draws the terms of a policy with which no sum, product or quotient rounds, as long as costs are multiples of
// 2^-10. The rate of a bucket is a power of two per microsecond.
func Dyadic(src Source) bucket.Terms {
	power := func(low, high int) float64 { return math.Ldexp(1, low+src.Pick(high-low+1)) }
	period := time.Duration(power(10, 20)) * time.Microsecond
	rate := power(0, 6)
	return ofEitherKind(src, rate, period, One(src, rate, power(0, 12), 3*power(-3, 10), 0),
		One(src, math.Inf(1), 0, power(-10, 12)), Dyadic)
}

// ofEitherKind returns the terms of a policy of either kind with those numbers, or draws again when there is none. An
// infinite owed is the largest there is.
func ofEitherKind(src Source, rate float64, period time.Duration, capacity, owed float64,
	again func(Source) bucket.Terms,
) bucket.Terms {
	terms := TokenBucket(rate, period, capacity)
	if src.Pick(3) == 0 {
		length := period.Microseconds()
		start := One(src, int64(src.Unit()*float64(length)), Opening, Opening+length/3,
			Opening+int64(src.Unit()*float64(Century)))
		terms = FixedWindow(rate, period, capacity, start)
	}
	if terms.MaxDebt = owed; math.IsInf(owed, 1) {
		terms.MaxDebt = min(bucket.MaxTokens, rate*(float64(bucket.MaxSpan)/float64(period)))
	}
	if !Valid(terms) {
		return again(src)
	}
	return terms
}

// Tokens returns what a bucket holds at now.
func Tokens(t bucket.Terms, s bucket.State, now int64) float64 { return t.Kind.Tokens(t, s, now) }

// Take returns the row of a bucket after cost was taken at now, if at least lowest remain. Otherwise it returns s and
// false.
func Take(t bucket.Terms, s bucket.State, now int64, cost, lowest float64) (bucket.State, bool) {
	return t.Kind.Take(t, s, now, cost, lowest)
}

// Wait returns how long it takes from now until Take succeeds.
func Wait(t bucket.Terms, s bucket.State, now int64, cost, lowest float64) time.Duration {
	return t.Kind.Wait(t, t.FixClock(s, now), now, cost, lowest)
}

// UntilFull returns how long it takes from now until a bucket is full.
func UntilFull(t bucket.Terms, s bucket.State, now int64) time.Duration {
	return Wait(t, s, now, t.Capacity, 0)
}

// Credit returns the row of a bucket after amount was given back at now, for tokens of the step that begins at until.
func Credit(t bucket.Terms, s bucket.State, now int64, amount float64, until int64) bucket.State {
	s, _ = t.Kind.Credit(t, s, now, amount, 0, until)
	return s
}

// CreditUntil returns the begin of the last step in which tokens that were taken at an instant may be given back.
func CreditUntil(t bucket.Terms, taken int64) int64 { return t.Kind.CreditUntil(t, taken) }
