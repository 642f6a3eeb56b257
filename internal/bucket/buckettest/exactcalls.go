package buckettest

import (
	"math"
	"math/big"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Rounds adds to Off what arithmetic on such numbers, and on what the bucket holds, may round.
func (b *ExactBucket) Rounds(numbers ...float64) {
	sum := 0.0
	for _, row := range b.rows {
		if row.value != nil {
			sum += size(row.value)
		}
	}
	for _, n := range numbers {
		sum += max(n, -n)
	}
	b.Off += 0x1p-47 * sum
}

// Level spreads tokens evenly over the rows of the bucket.
func (b *ExactBucket) Level(tokens *big.Rat, now int64) {
	e := b.Eras[b.era]
	each := quotient(tokens, big.NewRat(e.rows, 1))
	for i := range e.rows {
		b.rows[i] = exactBucket{value: each, ts: max(b.row(i, now).ts, e.begin(now))}
	}
	b.Rounds(size(e.capacity))
}

// Spend takes cost from all rows together, also if they hold less.
func (b *ExactBucket) Spend(cost float64, now int64) {
	b.Rounds(cost)
	b.Level(total(b.Tokens(now), rational(-cost)), now)
}

// SpendOne takes cost from one row.
func (b *ExactBucket) SpendOne(i int64, cost float64, now int64) {
	row := b.row(i, now)
	b.rows[i] = exactBucket{
		value: total(b.RowTokens(i, now), rational(-cost)), ts: max(row.ts, b.Eras[b.era].begin(now)),
	}
	b.Rounds(cost)
}

// Credit gives amount back to the rows: evenly, and then what full ones have left.
func (b *ExactBucket) Credit(amount float64, now int64) {
	e, rest := b.Eras[b.era].ofRow(), rational(amount)
	n := b.Eras[b.era].rows
	if n == 1 { // it may be full before now, too
		row := b.row(0, now)
		row.value = smaller(e.capacity, total(row.value, rest))
		b.rows[0] = row
		b.Rounds(amount)
		return
	}
	give := func(i int64, share *big.Rat) {
		row := b.row(i, now)
		room := total(e.capacity, negative(e.held(row, now)))
		given := smaller(smaller(share, rest), room)
		if given.Sign() > 0 {
			row.value = smaller(e.capacity, total(row.value, given))
			rest = total(rest, negative(given))
		}
		b.rows[i] = row
	}
	share := quotient(rest, big.NewRat(n, 1))
	for i := range n {
		give(i, share)
	}
	for i := range n {
		give(i, rest)
	}
	b.Rounds(amount)
}

// Fill fills the rows.
func (b *ExactBucket) Fill(now int64) {
	e := b.Eras[b.era].ofRow()
	for i := range b.Eras[b.era].rows {
		b.rows[i] = exactBucket{value: e.capacity, ts: max(b.row(i, now).ts, e.begin(now))}
	}
	b.Off = 0
}

// Adopt has the bucket hold what the algebra has settled at now: rounding has decided between the two.
func (b *ExactBucket) Adopt(rows []bucket.State, absent []bool, now int64) {
	b.era, b.rows, b.Off = b.Eras.At(now), make(map[int64]exactBucket), 0
	for i, s := range rows {
		if !absent[i] {
			b.rows[int64(i)] = exactBucket{value: rational(s.Value), ts: s.TS}
		}
	}
}

// Era returns the era that the bucket has been brought to.
func (b *ExactBucket) Era() int { return b.era }

// NewExactBucket returns a bucket without rows.
func NewExactBucket(eras ExactEras) *ExactBucket {
	return &ExactBucket{Eras: eras, rows: make(map[int64]exactBucket)}
}

// Off returns how far a number of the algebra is from an exact one.
func Off(got float64, want *big.Rat) float64 { return size(total(rational(got), negative(want))) }

// Spare returns how much held exceeds cost plus lowest.
func Spare(held *big.Rat, cost, lowest float64) float64 {
	spare, _ := total(held, rational(-cost), rational(-lowest)).Float64()
	return spare
}

// MayCredit reports whether tokens taken at an instant may be returned at another one, by the policy of an era. In a window they
// may until it ends.
func (eras ExactEras) MayCredit(era int, taken, now int64) bool {
	e := eras[era]
	return !e.windows || e.window(taken) >= e.window(now)
}

// DrawEras draws the terms of a limit in one to five eras. The first change is near Opening.
func DrawEras(src Source, draw func(Source) bucket.Terms) []bucket.Era {
	eras, from := make([]bucket.Era, 1+src.Pick(5)), Opening
	for i := range eras {
		terms := draw(src)
		if src.Pick(3) == 0 && i > 0 { // raised or lowered, as mostly
			terms = eras[i-1].Terms
			factor := One(src, 0.125, 0.5, 2.0, 10.0)
			terms.Capacity, terms.Rate, terms.MaxOwed = terms.Capacity*factor, terms.Rate*factor, terms.MaxOwed*factor
			if !Valid(terms) {
				terms = draw(src)
			}
		}
		terms.Shards = One(src, int32(1), 1, 1, 2, 4, 8)
		eras[i] = bucket.Era{From: from, Terms: terms, Change: bucket.Change(src.Pick(4))}
		if i == 0 {
			eras[i].From = math.MinInt64
		} else if !eras[i].Change.IsByRow(&eras[i-1].Terms, &terms) { // then mostly in as many rows, so that some change without a reset
			if eras[i].Terms.Shards = eras[i-1].Terms.Shards; src.Pick(3) == 0 || !eras[i].Change.IsByRow(&eras[i-1].Terms, &eras[i].Terms) {
				eras[i].Terms.Shards, eras[i].Change = terms.Shards, bucket.Reset
			}
		}
		from += 1 + int64(src.Unit()*src.Unit()*4*float64(Period(terms)))
	}
	return eras
}
