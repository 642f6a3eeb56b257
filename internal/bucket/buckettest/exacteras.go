package buckettest

import (
	"math"
	"math/big"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// The change of a bucket with its policy, in rational numbers. It is written from the law
//
//	at from      v1 = min(C0, v + what arrived by the old terms after ts, up to and with from)
//	full         v1 = C0: v2 = C1, because a bucket without a row is full
//	else         v2 = min(C1, keep v1 | scale v1 * C1 / C0 | add v1 + C1 - C0), and reset C1
//	after from   tokens arrive by the new terms; a window of theirs that had begun before from gives nothing
//
// and shares no code with the package that it checks. Each row is such a bucket of its own, with a share of the terms. Only a reset
// changes the number of rows.

// ExactEras are the terms of a limit at all instants.
type ExactEras []exactEra

type exactEra struct {
	exactPolicy

	from   int64
	rows   int64
	change bucket.Change
}

// ExactlyEras returns the eras.
func ExactlyEras(eras []bucket.Era) ExactEras {
	exact := make(ExactEras, len(eras))
	for i, e := range eras {
		exact[i] = exactEra{exactPolicy: exactly(e.Terms), from: e.From, rows: int64(max(e.Terms.Shards, 1)), change: e.Change}
	}
	exact[0].from = math.MinInt64
	return exact
}

// At returns which era holds at an instant.
func (eras ExactEras) At(now int64) (i int) {
	for i+1 < len(eras) && eras[i+1].from <= now {
		i++
	}
	return i
}

// ofRow returns the policy of one row.
func (e exactEra) ofRow() exactEra {
	n := big.NewRat(e.rows, 1)
	e.rate, e.capacity, e.rows = quotient(e.rate, n), quotient(e.capacity, n), 1
	return e
}

// begin returns the start of the window, or microsecond, that holds now, but not before the era.
func (e exactEra) begin(now int64) int64 { return max(e.floor(now), e.from) }

// isWrong reports whether a clock that was wrong wrote ts.
func (e exactEra) isWrong(ts, now int64) bool { return ts > e.begin(now)+e.step()+Minute }

// held returns the value of a row at now, if no era begins meanwhile.
func (e exactEra) held(row exactBucket, now int64) *big.Rat {
	return smaller(e.capacity, total(row.value, e.arrived(row.ts, now)))
}

// changed returns the value at the beginning of the era, for the value held at the end of the era before.
func (e exactEra) changed(held *big.Rat, before exactEra) *big.Rat {
	switch {
	case e.change == bucket.Reset || held.Cmp(before.capacity) >= 0:
		return e.capacity
	case e.change == bucket.Scale && before.capacity.Sign() > 0:
		held = quotient(product(held, e.capacity), before.capacity)
	case e.change == bucket.Add:
		held = total(held, e.capacity, negative(before.capacity))
	}
	return smaller(e.capacity, held)
}

// ExactBucket is a bucket through the eras of its limit. Off is how far rounding may have brought what the algebra has.
type ExactBucket struct {
	Eras ExactEras
	Off  float64

	era  int
	rows map[int64]exactBucket // the existing rows
}

// Clone returns a copy.
func (b *ExactBucket) Clone() *ExactBucket {
	c := *b
	c.rows = make(map[int64]exactBucket, len(b.rows))
	for i, row := range b.rows {
		c.rows[i] = row
	}
	return &c
}

// IsThere reports whether the bucket has a row.
func (b *ExactBucket) IsThere() bool { return len(b.rows) > 0 }

// Tokens returns the tokens of the bucket at an instant passed to Bring, or a later one if no other era begins.
func (b *ExactBucket) Tokens(now int64) *big.Rat {
	sum, e := new(big.Rat), b.Eras[b.era].ofRow()
	for i := range b.Eras[b.era].rows {
		sum = total(sum, e.held(b.row(i, now), now))
	}
	return sum
}

// RowTokens is Tokens for one of the rows.
func (b *ExactBucket) RowTokens(i, now int64) *big.Rat {
	return b.Eras[b.era].ofRow().held(b.row(i, now), now)
}

// row returns a row, or what none means.
func (b *ExactBucket) row(i, now int64) exactBucket {
	if row, found := b.rows[i]; found {
		return row
	}
	e := b.Eras[b.era].ofRow()
	return exactBucket{value: e.capacity, ts: e.begin(now)}
}

// Bring moves the bucket to the era in effect at now, unless it is in a later era already, and returns the instant to decide at.
// unsure says that rounding decides whether a row was full when an era ended.
func (b *ExactBucket) Bring(now int64) (at int64, unsure bool) {
	holding := b.Eras.At(now)
	if !b.IsThere() {
		b.era = holding
	}
	switch {
	case b.era <= holding:
	case b.isWrong(holding, now):
		b.era = holding
	default:
		now, holding = b.Eras[b.era].from, b.era
	}
	for b.era < holding {
		unsure = b.enter(b.era+1) || unsure
	}
	e := b.Eras[b.era].ofRow()
	for i, row := range b.rows {
		switch {
		case row.value == nil:
			b.rows[i] = exactBucket{value: e.capacity, ts: e.begin(now)}
		case e.isWrong(row.ts, now):
			row.ts = e.begin(now)
			b.rows[i] = row
		}
	}
	return now, unsure
}

// isWrong reports whether the rows are of a clock that was wrong.
func (b *ExactBucket) isWrong(era int, now int64) bool {
	for _, row := range b.rows {
		if !b.Eras[era].isWrong(row.ts, now) {
			return false
		}
	}
	return true
}

// isFull reports whether the rows have been filled by a change, and nothing has happened to them since.
func (b *ExactBucket) isFull() bool {
	for _, row := range b.rows {
		if row.value != nil {
			return false
		}
	}
	return true
}

// enter brings the bucket over the begin of the next era.
func (b *ExactBucket) enter(next int) (unsure bool) {
	before, after := b.Eras[b.era], b.Eras[next]
	from, rows := after.from, make(map[int64]exactBucket)
	switch {
	case !b.IsThere():
	case after.change == bucket.Reset || b.isFull():
		for i := range b.rows {
			if i < after.rows {
				rows[i] = exactBucket{} // full from here on
			}
		}
	default:
		for i, row := range b.rows {
			held := before.ofRow().held(row, from)
			unsure = unsure || b.isOpen(total(row.value, before.ofRow().arrived(row.ts, from)), before.ofRow())
			rows[i] = exactBucket{value: after.ofRow().changed(held, before.ofRow()), ts: from}
		}
	}
	if after.change == bucket.Scale && before.capacity.Sign() > 0 {
		b.Off *= max(1, size(quotient(after.capacity, before.capacity)))
	}
	b.era, b.rows = next, rows
	b.Rounds(size(before.capacity), size(after.capacity))
	return unsure
}

// isOpen reports whether rounding decides if there are as many tokens as the capacity.
func (b *ExactBucket) isOpen(tokens *big.Rat, e exactEra) bool {
	distance := size(total(tokens, negative(e.capacity)))
	return distance > 0 && distance <= b.Off+0x1p-48*size(tokens)
}
