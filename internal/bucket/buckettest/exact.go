package buckettest

import (
	"math/big"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// The algebra once more, in rational numbers and without rounding. It is written from the equations
//
//	units  = max(0, now - ts) / period                       token bucket
//	units  = windows begun after ts, up to now               fixed window
//	value' = min(capacity, value + rate * units) - cost
//	ts'    = max(ts, now), or max(ts, the start of now's window)
//	no row is a full bucket
//
// and shares no code with the package that it checks. A ts that lies more than a minute after the end of the current microsecond,
// or window, is the mark of a wrong clock, and is set to now without credit.

// exactPolicy is a policy in rational numbers.
type exactPolicy struct {
	windows  bool
	rate     *big.Rat
	period   *big.Rat // microseconds
	capacity *big.Rat
	start    int64 // some window's, microseconds since 1970
}

// exactBucket is a bucket without rounding.
type exactBucket struct {
	value *big.Rat
	ts    int64
}

// exactly returns the policy that has the terms t.
func exactly(t bucket.Terms) exactPolicy {
	return exactPolicy{
		windows: t.Step > 1, start: t.Phase, // windows of a microsecond are a token bucket
		rate: rational(t.Rate), period: product(rational(t.Steps), big.NewRat(t.Step, 1)), capacity: rational(t.Capacity),
	}
}

// floor returns the start of the window, or microsecond, that holds t.
func (p exactPolicy) floor(t int64) int64 {
	if !p.windows {
		return t
	}
	return p.start + p.window(t)*p.step()
}

// window returns how many windows have begun after the window of start, up to t; negative before it.
func (p exactPolicy) window(t int64) int64 {
	return new(big.Int).Div(big.NewInt(t-p.start), big.NewInt(p.step())).Int64() // rounds towards minus infinity
}

func (p exactPolicy) step() int64 {
	if !p.windows {
		return 1 // microsecond
	}
	return p.period.Num().Int64()
}

// arrived returns the tokens that arrive after ts, up to now.
func (p exactPolicy) arrived(ts, now int64) *big.Rat {
	units := quotient(big.NewRat(max(0, now-ts), 1), p.period)
	if p.windows {
		units = big.NewRat(max(0, p.window(now)-p.window(ts)), 1)
	}
	return product(p.rate, units)
}

func rational(f float64) *big.Rat     { return new(big.Rat).SetFloat64(f) }
func product(a, b *big.Rat) *big.Rat  { return new(big.Rat).Mul(a, b) }
func quotient(a, b *big.Rat) *big.Rat { return new(big.Rat).Quo(a, b) }
func negative(a *big.Rat) *big.Rat    { return new(big.Rat).Neg(a) }

func total(terms ...*big.Rat) *big.Rat {
	sum := new(big.Rat)
	for _, term := range terms {
		sum.Add(sum, term)
	}
	return sum
}

func smaller(a, b *big.Rat) *big.Rat {
	if a.Cmp(b) < 0 {
		return a
	}
	return b
}

// size returns |a| as a float64.
func size(a *big.Rat) float64 {
	f, _ := new(big.Rat).Abs(a).Float64()
	return f
}
