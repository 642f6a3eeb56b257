package buckettest

import (
	"maps"
	"math"
	"math/big"
	"sort"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// The change of a bucket with its policy, in rational numbers. Of the policies before, the one that wrote the row
// counts. It is written from the law
//
//	at from      v1 = min(C0, v + what arrived by the old terms after ts, up to and with from)
//	full         v1 = C0: v2 = C1, because a bucket without a row is full
//	else         v2 = min(C1, keep v1 | scale v1 * C1 / C0 | add v1 + C1 - C0), and reset C1
//	carry        v2 = C1 - used, or what was owed if that is more; in a window, used is kept when nothing is left
//	after from   tokens arrive by the new terms; a window of theirs that had begun before from gives nothing
//
// and shares no code with the package that it checks. Each row is such a bucket of its own, with a share of the terms.
// Only a reset changes the number of rows.

// ExactRevisions are the terms of a limit at all instants.
type ExactRevisions []exactEra

type exactEra struct {
	exactPolicy

	from   int64
	rows   int64
	change bucket.Change
}

// ExactlyRevisions returns the revisions. The windows of a calendar have begins, of each revision.
func ExactlyRevisions(revisions []bucket.Revision, begins ...[]int64) ExactRevisions {
	exact := make(ExactRevisions, len(revisions))
	for i, e := range revisions {
		exact[i] = exactEra{exactPolicy: exactly(e.Terms), from: e.From, rows: 1, change: e.Change}
	}
	for i := range begins {
		exact[i].begins = begins[i]
	}
	exact[0].from = math.MinInt64
	return exact
}

// At returns which revision holds at an instant.
func (revisions ExactRevisions) At(now int64) (i int) {
	for i+1 < len(revisions) && revisions[i+1].from <= now {
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

// begin returns the start of the window, or microsecond, that holds now, but not before the revision.
func (e exactEra) begin(now int64) int64 { return max(e.floor(now), e.from) }

// isWrong reports whether a clock that was wrong wrote ts.
func (exactEra) isWrong(ts, now int64) bool { return ts > now+Minute }

// held returns the value of a row at now, if no revision begins meanwhile.
func (e exactEra) held(row exactBucket, now int64) *big.Rat {
	return smaller(e.capacity, total(row.value, e.arrived(row.ts, now)))
}

// entered returns the row at the beginning of the revision, after the row in the revision before.
func (e exactEra) entered(row exactBucket, before exactEra) exactBucket {
	held := before.held(row, e.from)
	if e.change == bucket.Carry && e.windows {
		return e.carried(exactBucket{value: held, ts: e.from, of: before.frame(row, e.from)})
	}
	return exactBucket{value: e.changed(held, before), ts: e.from, of: e.capacity}
}

// frame returns the capacity of which the row has used a part at now.
func (e exactEra) frame(row exactBucket, now int64) *big.Rat {
	if e.windows && e.begin(now) > row.ts || e.held(row, now).Cmp(e.capacity) >= 0 {
		return e.capacity
	}
	return row.of
}

// carried returns the row of a window after the same was used of another capacity.
func (e exactEra) carried(row exactBucket) exactBucket {
	if !e.windows {
		return row
	}
	used, owed := total(row.of, negative(row.value)), smaller(row.value, new(big.Rat))
	row.value = smaller(e.capacity, total(e.capacity, negative(used)))
	row.of = e.capacity
	if row.value.Cmp(owed) < 0 {
		row.value, row.of = owed, total(owed, used)
	}
	return row
}

// changed returns the value at the beginning of the revision, for the value held at the end of the revision before.
func (e exactEra) changed(held *big.Rat, before exactEra) *big.Rat {
	switch {
	case e.change == bucket.Reset || held.Cmp(before.capacity) >= 0:
		return e.capacity
	case e.change == bucket.Scale && before.capacity.Sign() > 0:
		held = quotient(product(held, e.capacity), before.capacity)
	case e.change == bucket.Add:
		held = total(held, e.capacity, negative(before.capacity))
	case e.change == bucket.Carry:
		owed, left := smaller(held, new(big.Rat)), total(held, e.capacity, negative(before.capacity))
		if held = left; left.Cmp(owed) < 0 {
			held = owed
		}
	}
	return smaller(e.capacity, held)
}

// ExactBucket is a bucket through the revisions of its limit. Off is how far rounding may have brought what the algebra
// has.
type ExactBucket struct {
	Revisions ExactRevisions
	Off       float64

	revision int
	rows     map[int64]exactBucket // the existing rows
}

// Clone returns a copy.
func (b *ExactBucket) Clone() *ExactBucket {
	c := *b
	c.rows = maps.Clone(b.rows)
	return &c
}

// Redefine has a bucket of one row be in other revisions from now on, as after a change of the code.
func (b *ExactBucket) Redefine(revisions ExactRevisions) {
	b.Revisions = revisions
	b.revision = revisions.At(b.rows[0].ts)
	b.rows[0] = revisions[b.revision].ofRow().carried(b.rows[0])
}

// IsThere reports whether the bucket has a row.
func (b *ExactBucket) IsThere() bool { return len(b.rows) > 0 }

// Tokens returns the tokens of the bucket at an instant passed to Bring, or a later one if no other revision begins.
func (b *ExactBucket) Tokens(now int64) *big.Rat {
	sum, e := new(big.Rat), b.Revisions[b.revision].ofRow()
	for i := range b.Revisions[b.revision].rows {
		sum = total(sum, e.held(b.row(i, now), now))
	}
	return sum
}

// RowTokens is Tokens for one of the rows.
func (b *ExactBucket) RowTokens(i, now int64) *big.Rat {
	return b.Revisions[b.revision].ofRow().held(b.row(i, now), now)
}

// row returns a row, or what none means.
func (b *ExactBucket) row(i, now int64) exactBucket {
	if row, found := b.rows[i]; found {
		return row
	}
	e := b.Revisions[b.revision].ofRow()
	return exactBucket{value: e.capacity, ts: e.begin(now), of: e.capacity}
}

// Bring moves the bucket to the revision in effect at now, unless it is in a later revision already, and returns the
// instant to decide at. unsure says that rounding decides whether a row was full when a revision ended.
func (b *ExactBucket) Bring(now int64) (at int64, unsure bool) {
	holding := b.Revisions.At(now)
	if !b.IsThere() {
		b.revision = holding
	}
	switch {
	case b.revision <= holding:
	case b.isWrong(holding, now):
		b.revision = holding
	default:
		now, holding = b.Revisions[b.revision].from, b.revision
	}
	if b.revision < holding {
		unsure = b.enter(holding)
	}
	e := b.Revisions[b.revision].ofRow()
	for i, row := range b.rows {
		switch {
		case row.value == nil:
			b.rows[i] = exactBucket{value: e.capacity, ts: e.begin(now), of: e.capacity}
		case e.isWrong(row.ts, now):
			row.ts = e.begin(now)
			b.rows[i] = e.carried(row) // it may be of a later revision
			b.Rounds(size(row.value))
		}
	}
	return now, unsure
}

// isWrong reports whether the rows are of a clock that was wrong.
func (b *ExactBucket) isWrong(revision int, now int64) bool {
	for _, row := range b.rows {
		if !b.Revisions[revision].isWrong(row.ts, now) {
			return false
		}
	}
	return true
}

// IsWrong reports whether the rows are of a clock that was wrong, in any revision.
func (b *ExactBucket) IsWrong(now int64) bool { return b.IsThere() && b.isWrong(b.revision, now) }

// enter brings the bucket to a revision, each row from the revision that wrote it. A reset since then has filled it.
func (b *ExactBucket) enter(next int) (unsure bool) {
	after, from, rows, grown := b.Revisions[next], b.Revisions[next].from, make(map[int64]exactBucket), 1.0
	for i, row := range b.rows {
		first := b.Revisions.At(row.ts)
		switch before := b.Revisions[first]; {
		case b.Revisions.resets(first, next):
			if i < after.rows {
				rows[i] = exactBucket{} // full from here on
			}
		case first >= next:
			rows[i] = after.ofRow().carried(row)
		default:
			unsure = unsure || b.isOpen(total(row.value, before.ofRow().arrived(row.ts, from)), before.ofRow())
			rows[i] = after.ofRow().entered(row, before.ofRow())
			b.Rounds(size(row.value), size(before.capacity)) // a debt may be far above both capacities
			if after.change == bucket.Scale && before.capacity.Sign() > 0 {
				grown = max(grown, size(quotient(after.capacity, before.capacity)))
			}
		}
	}
	b.Off *= grown
	b.revision, b.rows = next, rows
	b.Rounds(size(after.capacity))
	return unsure
}

// resets reports whether a revision after the first one up to the last one fills the bucket.
func (revisions ExactRevisions) resets(first, last int) bool {
	for i := first + 1; i <= last; i++ {
		if revisions[i].change == bucket.Reset {
			return true
		}
	}
	return false
}

// isOpen reports whether rounding decides if there are as many tokens as the capacity.
func (b *ExactBucket) isOpen(tokens *big.Rat, e exactEra) bool {
	distance := size(total(tokens, negative(e.capacity)))
	return distance > 0 && distance <= b.Off+0x1p-48*size(tokens)
}

// The algebra once more, in rational numbers and without rounding. It is written from the equations
//
//	units  = max(0, now - ts) / period                       token bucket
//	units  = windows begun after ts, up to now               fixed window
//	value' = min(capacity, value + rate * units) - cost
//	ts'    = max(ts, now), or max(ts, the start of now's window)
//	no row is a full bucket
//
// and shares no code with the package that it checks. A ts that lies more than a minute in the future is the mark of a
// wrong clock, and is set to now without credit.

type exactPolicy struct {
	windows  bool
	rate     *big.Rat
	period   *big.Rat // microseconds
	capacity *big.Rat
	start    int64   // some window's, microseconds since 1970
	begins   []int64 // of the windows of a calendar, in order
}

// exactBucket is a bucket without rounding.
type exactBucket struct {
	value *big.Rat
	ts    int64
	of    *big.Rat // the capacity that value is left of
}

func exactly(t bucket.Terms) exactPolicy {
	return exactPolicy{
		windows: t.Step > 1, start: t.Phase, // windows of a microsecond are a token bucket
		rate: rational(t.Rate), period: product(rational(t.Steps), big.NewRat(t.Step, 1)), capacity: rational(t.Capacity),
	}
}

// floor returns the start of the window, or microsecond, that holds t.
func (p exactPolicy) floor(t int64) int64 {
	switch {
	case !p.windows:
		return t
	case p.begins != nil:
		return p.begins[p.window(t)-1]
	}
	return p.start + p.window(t)*p.step(t)
}

// window returns how many windows have begun after the window of start, up to t; negative before it.
func (p exactPolicy) window(t int64) int64 {
	if p.begins != nil {
		return int64(sort.Search(len(p.begins), func(i int) bool { return p.begins[i] > t }))
	}
	return new(big.Int).Div(big.NewInt(t-p.start), big.NewInt(p.step(t))).Int64() // rounds towards minus infinity
}

// step returns the length of the window, or microsecond, that holds t.
func (p exactPolicy) step(t int64) int64 {
	switch {
	case !p.windows:
		return 1
	case p.begins != nil:
		return p.begins[p.window(t)] - p.floor(t)
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
	e := b.Revisions[b.revision]
	isOver := func(i int64) bool { // more was used than its share of a window, so it gets no tokens
		return e.windows && tokens.Sign() >= 0 && e.ofRow().frame(b.row(i, now), now).Cmp(e.ofRow().capacity) != 0
	}
	n := int64(0)
	for i := range e.rows {
		if !isOver(i) {
			n++
		}
	}
	levelled := make(map[int64]exactBucket)
	for i := range e.rows {
		row := b.row(i, now)
		levelled[i] = exactBucket{value: new(big.Rat), ts: max(row.ts, e.begin(now)), of: e.ofRow().frame(row, now)}
		if !isOver(i) {
			levelled[i] = exactBucket{value: quotient(tokens, big.NewRat(n, 1)), ts: levelled[i].ts, of: levelled[i].of}
		}
	}
	maps.Copy(b.rows, levelled)
	b.Rounds(size(e.capacity))
}

// Spend takes cost from all rows together, also if they hold less.
func (b *ExactBucket) Spend(cost float64, now int64) {
	b.Rounds(cost)
	b.Level(total(b.Tokens(now), rational(-cost)), now)
}

// Credit gives amount back to the rows: evenly, and then what full ones have left.
func (b *ExactBucket) Credit(amount float64, now int64) {
	e, rest := b.Revisions[b.revision].ofRow(), rational(amount)
	n := b.Revisions[b.revision].rows
	if n == 1 { // it may be full before now, too
		row := b.row(0, now)
		row.value = smaller(e.most(row), total(row.value, rest))
		b.rows[0] = e.carried(row)
		b.Rounds(amount)
		return
	}
	give := func(i int64, share *big.Rat) {
		row := b.row(i, now)
		room := total(e.most(row), negative(e.held(row, now)))
		given := smaller(smaller(share, rest), room)
		if given.Sign() > 0 {
			row.value = smaller(e.most(row), total(row.value, given))
			rest = total(rest, negative(given))
		}
		b.rows[i] = e.carried(row)
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

// most returns the value up to which a row takes tokens back: the row of a window may have used more than the capacity.
func (e exactEra) most(row exactBucket) *big.Rat {
	if e.windows && row.of.Cmp(e.capacity) > 0 {
		return row.of
	}
	return e.capacity
}

// Fill fills the rows.
func (b *ExactBucket) Fill(now int64) {
	e := b.Revisions[b.revision].ofRow()
	for i := range b.Revisions[b.revision].rows {
		b.rows[i] = exactBucket{value: e.capacity, ts: e.begin(now), of: e.capacity}
	}
	b.Off = 0
}

// Adopt has the bucket hold what the algebra has settled at now: rounding has decided between the two.
func (b *ExactBucket) Adopt(rows []bucket.State, absent []bool, now int64) {
	b.revision, b.rows, b.Off = b.Revisions.At(now), make(map[int64]exactBucket), 0
	for i, s := range rows {
		if !absent[i] {
			b.rows[int64(i)] = exactBucket{value: rational(s.Value), ts: s.TS, of: rational(s.Capacity)}
		}
	}
	b.Rounds() // their sum
}

// NewExactBucket returns a bucket without rows.
func NewExactBucket(revisions ExactRevisions) *ExactBucket {
	return &ExactBucket{Revisions: revisions, rows: make(map[int64]exactBucket)}
}

// Off returns how far a number of the algebra is from an exact one.
func Off(got float64, want *big.Rat) float64 { return size(total(rational(got), negative(want))) }

// Spare returns how much held exceeds cost plus lowest.
func Spare(held *big.Rat, cost, lowest float64) float64 {
	spare, _ := total(held, rational(-cost), rational(-lowest)).Float64()
	return spare
}

// MayCredit reports whether tokens taken at an instant may be returned at another one, by the policy of a revision. In
// a window they may until it ends.
func (revisions ExactRevisions) MayCredit(revision int, taken, now int64) bool {
	e := revisions[revision]
	return !e.windows || e.window(taken) >= e.window(now)
}

// DrawRevisions draws the terms of a limit in one to five revisions. The first change is near Opening, and a change of
// the kind is a reset.
func DrawRevisions(src Source, draw func(Source) bucket.Terms) []bucket.Revision {
	revisions, from := make([]bucket.Revision, 1+src.Pick(5)), Opening
	for i := range revisions {
		terms := draw(src)
		if src.Pick(3) == 0 && i > 0 { // raised or lowered, as mostly
			terms = revisions[i-1].Terms
			factor := One(src, 0.125, 0.5, 2.0, 10.0)
			terms.Capacity, terms.Rate, terms.MaxDebt = terms.Capacity*factor, terms.Rate*factor, terms.MaxDebt*factor
			if !Valid(terms) {
				terms = draw(src)
			}
		}
		revisions[i] = bucket.Revision{From: from, Terms: terms, Change: bucket.Change(src.Pick(5))}
		switch {
		case i == 0:
			revisions[i].From = math.MinInt64
		case (terms.Step > 1) != (revisions[i-1].Terms.Step > 1):
			revisions[i].Change = bucket.Reset
		}
		from += 1 + int64(src.Unit()*src.Unit()*4*float64(Period(terms)))
	}
	return revisions
}
