package ratelimit

import (
	"fmt"
	"math"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// terms returns the subject's policy as the statements see it.
func (s *subject) terms() bucket.Terms { return s.limit.termsFor(s.key) }

// state returns the subject's row, or what no row means.
func (s *subject) state(now int64) bucket.State {
	if s.row == nil {
		return s.terms().Full(now)
	}
	return *s.row
}

// exactly returns the subject's policy in rational numbers. Where windows begin that have no Start is the
// implementation's to choose, once for each key and period, so the model takes it from the first answer.
func (s *subject) exactly(now int64) exactPolicy {
	var start int64
	if p, ok := s.limit.policy.(FixedWindow); ok && p.Start.IsZero() {
		if _, known := s.starts[p.Period]; !known {
			s.starts[p.Period] = s.terms().Full(now).TS
		}
		start = s.starts[p.Period]
	}
	return exactly(s.limit.policy, start)
}

// exactBucket returns the model's bucket, or what no row means.
func (s *subject) exactBucket(e exactPolicy, now int64) exactBucket {
	if s.model == nil {
		return e.full(now)
	}
	return *s.model
}

// mend brings a ts of a wrong clock back to now.
func (s *subject) mend(now int64) {
	row, e := s.terms().FixClock(s.state(now), now), s.exactly(now)
	model := s.exactBucket(e, now)
	model.ts = e.floor(now)
	s.row, s.model = &row, &model
}

func (s *subject) String() string {
	row := "no row"
	if s.row != nil {
		row = fmt.Sprintf("row{value: %v, ts: %d}", s.row.Value, s.row.TS)
	}
	return fmt.Sprintf("%#v %s", s.limit.policy, row)
}

// everyday draws a policy as programs have them.
func everyday(src source) Policy {
	rate := one(src, 1, 3, 5, 9, 10, 60, 70, 100, 1000, 40_000, 0.1, 1.0/3, 2.5)
	period := one(src, time.Microsecond, time.Millisecond, 16_667*time.Microsecond, 999_983*time.Microsecond,
		time.Second, 7*time.Second, time.Minute, time.Hour, Day, Week)
	return valid(src, rate, period,
		one(src, 0, 0, 0, rate/3, rate/2, 2*rate, 7*rate, 3, NoCapacity), one(src, 0, 0, NoReservations, NoDebt, rate/2, 3, 0.2), everyday)
}

// extreme draws a policy from all that NewLimit accepts, evenly over the orders of magnitude.
func extreme(src source) Policy {
	between := func(low, high float64) float64 { return low * math.Pow(high/low, src.unit()) }
	period := time.Duration(between(1, float64(bucket.MaxSpan/time.Microsecond))) * time.Microsecond
	return valid(src, between(bucket.MinTokens, bucket.MaxTokens), period,
		one(src, 0, NoCapacity, between(bucket.MinTokens, bucket.MaxTokens), bucket.MaxTokens, bucket.MinTokens),
		one(src, 0, NoReservations, between(bucket.MinTokens, bucket.MaxTokens), bucket.MaxTokens, bucket.MinTokens), extreme)
}

// dyadic draws a policy with which no sum, product or quotient rounds, as long as costs are multiples of
// 2^-10: the rate of a bucket is a power of two per microsecond.
func dyadic(src source) Policy {
	power := func(low, high int) float64 { return math.Ldexp(1, low+src.pick(high-low+1)) }
	period := time.Duration(power(10, 20)) * time.Microsecond
	return valid(src, power(0, 6), period,
		one(src, 0, power(0, 12), 3*power(-3, 10), NoCapacity), one(src, 0, NoReservations, NoDebt, power(-10, 12)), dyadic)
}

// valid returns the policy of either kind with those numbers, or draws again when they are none.
func valid(src source, rate float64, period time.Duration, capacity, maxReserved float64, again func(source) Policy) Policy {
	var policy Policy = TokenBucket{Rate: rate, Period: period, Capacity: capacity, MaxReserved: maxReserved}
	if src.pick(3) == 0 {
		start := one(src, time.Time{}, opening, opening.Add(period/3), opening.Add(time.Duration(src.unit()*float64(100*365*Day))))
		policy = FixedWindow{Rate: rate, Period: period, Capacity: capacity, MaxReserved: maxReserved, Start: start.Truncate(time.Microsecond)}
	}
	if _, err := policy.compile(); err != nil {
		return again(src)
	}
	return policy
}
