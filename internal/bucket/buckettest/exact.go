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
//	allowed      when value' >= lowest
//	retry after  ts + (lowest + cost - value) / (rate / period) - now, or the start of the window that
//	             brings the last missing token; in whole microseconds, rounded up
//	no row       is a full bucket
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

// exactBucket is a bucket without rounding. rounding is how far the value of the algebra may be off by now.
type exactBucket struct {
	value    *big.Rat
	ts       int64
	rounding float64
}

const (
	microsecond = int64(1)

	// added and left bound the error of a write, as shares of the sum and of the remaining value: four roundings (a long time as a
	// float64, times rate, by steps, plus value), and one (less cost).
	added = 4 * 0x1p-53
	left  = 0x1p-53
)

// exactly returns the policy that has the terms t.
func exactly(t bucket.Terms) exactPolicy {
	return exactPolicy{
		windows: t.Step > 1, start: t.Phase, // windows of a microsecond are a token bucket
		rate: rational(t.Rate), period: product(rational(t.Steps), big.NewRat(t.Step, 1)), capacity: rational(t.Capacity),
	}
}

// RowsOff returns the difference between the tokens of the rows by the algebra and by the same number of exact buckets, and the
// bound of the rounding error.
func RowsOff(t bucket.Terms, rows []bucket.State, now int64) (off, mayBe float64) {
	e, n := exactly(t), big.NewRat(int64(t.Shards), 1)
	e.rate, e.capacity = quotient(e.rate, n), quotient(e.capacity, n)
	sum := new(big.Rat)
	for _, s := range rows {
		row := exactBucket{value: rational(s.Value), ts: s.TS}
		if e.wrong(row.ts, now) {
			row.ts = e.floor(now)
		}
		row = e.settle(row, now)
		sum, mayBe = total(sum, row.value), mayBe+row.rounding
		mayBe += 7 * left * size(row.value) // of adding up 64 rows, pair by pair
	}
	return size(total(sum, negative(rational(bucket.Rows(rows).Tokens(&t, now))))), mayBe
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
		return microsecond
	}
	return p.period.Num().Int64()
}

func (p exactPolicy) full(now int64) exactBucket {
	return exactBucket{value: p.capacity, ts: p.floor(now)}
}

// arrived returns the tokens that arrive after ts, up to now.
func (p exactPolicy) arrived(ts, now int64) *big.Rat {
	units := quotient(big.NewRat(max(0, now-ts), 1), p.period)
	if p.windows {
		units = big.NewRat(max(0, p.window(now)-p.window(ts)), 1)
	}
	return product(p.rate, units)
}

// settle returns b as of now, with the ts of a take, and the value before the cost.
func (p exactPolicy) settle(b exactBucket, now int64) exactBucket {
	arrived := p.arrived(b.ts, now)
	sum := total(b.value, arrived)
	out := exactBucket{value: smaller(p.capacity, sum), ts: max(b.ts, p.floor(now))}
	if p.wrong(b.ts, now) {
		out.ts = p.floor(now)
	}
	out.rounding = b.rounding + added*(size(b.value)+b.rounding+size(arrived))
	if size(total(sum, negative(p.capacity))) > out.rounding && sum.Cmp(p.capacity) > 0 {
		out.rounding = 0 // full, however the sum was rounded
	}
	return out
}

// spend returns b less cost.
func (b exactBucket) spend(cost *big.Rat) exactBucket {
	b.value = total(b.value, negative(cost))
	b.rounding += left * (size(b.value) + b.rounding)
	return b
}

// wrong reports whether a clock that was wrong wrote ts.
func (p exactPolicy) wrong(ts, now int64) bool { return ts > p.floor(now)+p.step()+Minute }

// retryAt returns the instant at which b, whose ts is right, has got the missing tokens.
func (p exactPolicy) retryAt(b exactBucket, missing *big.Rat) *big.Int {
	if !p.windows {
		return new(big.Int).Add(big.NewInt(b.ts), ceil(quotient(product(missing, p.period), p.rate)))
	}
	n := new(big.Int).Add(big.NewInt(p.window(b.ts)), ceil(quotient(missing, p.rate)))
	return n.Add(n.Mul(n, big.NewInt(p.step())), big.NewInt(p.start))
}

func rational(f float64) *big.Rat     { return new(big.Rat).SetFloat64(f) }
func product(a, b *big.Rat) *big.Rat  { return new(big.Rat).Mul(a, b) }
func quotient(a, b *big.Rat) *big.Rat { return new(big.Rat).Quo(a, b) }
func negative(a *big.Rat) *big.Rat    { return new(big.Rat).Neg(a) }
func ceil(a *big.Rat) *big.Int        { n := new(big.Int).Neg(a.Num()); return n.Neg(n.Div(n, a.Denom())) }

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
