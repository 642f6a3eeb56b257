package integration_test

import (
	"maps"
	"math/big"
	"slices"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The documented behaviour of reservations, implemented a second time in rational numbers without rounding. Instants are
// microseconds since 1970.

// exactTerms are the terms of a limit at some time.
type exactTerms struct {
	request                 ratelimit.Request
	windows                 bool
	rate, capacity, maxOwed *big.Rat
	period                  int64
	origin                  int64 // some window's start
}

// exactBucket is a bucket: value tokens at ts. off is how far the limiter's value may be from it by rounding.
type exactBucket struct {
	exactTerms

	value  *big.Rat
	ts     int64
	off    float64
	stored bool
	mended int64 // what ts may be instead, after a refusal; else 0
}

// lease is a reservation.
type lease struct {
	id               string
	state            ratelimit.ReservationState
	costs            map[int]float64 // by bucket
	ready, expires   int64
	started, release bool
	work             []*work
	terms            map[int]exactTerms // it was made under, by bucket
	paid             map[int]int64      // from when on each bucket owes nothing
}

const (
	modelMinute  = int64(60_000_000)
	modelStale   = 20 * modelMinute / 60
	modelExpire  = 60 * modelMinute
	modelKeep    = 7 * 24 * 60 * modelMinute
	modelRounded = 8 * 0x1p-53              // of all that a write adds up
	modelAlways  = int64(-2208988800000000) // 1900
)

func rat(f float64) *big.Rat { return new(big.Rat).SetFloat64(f) }

func sum(a, b *big.Rat) *big.Rat { return new(big.Rat).Add(a, b) }

func float(a *big.Rat) float64 {
	f, _ := a.Float64()
	return f
}

func newExactTerms(request ratelimit.Request) exactTerms {
	b := exactTerms{request: request, capacity: rat(request.Limit().Capacity()), origin: clockNoon.UnixMicro()}
	var maxReserved float64
	switch p := request.Limit().Policy().(type) {
	case ratelimit.TokenBucket:
		b.rate, b.period, maxReserved = rat(p.Rate), p.Period.Microseconds(), p.MaxReserved
	case ratelimit.FixedWindow:
		b.windows, b.rate, b.period, maxReserved = true, rat(p.Rate), p.Period.Microseconds(), p.MaxReserved
	}
	if b.maxOwed = rat(maxReserved); maxReserved == 0 {
		b.maxOwed = rat(1e9) // more than any history owes
	}
	return b
}

// newExactBucket returns a full bucket.
func newExactBucket(request ratelimit.Request, now int64) *exactBucket {
	b := &exactBucket{exactTerms: newExactTerms(request)}
	b.value, b.ts = b.capacity, b.floor(now)
	return b
}

// floor returns the start of the window that holds t, or t.
func (b *exactTerms) floor(t int64) int64 {
	if !b.windows {
		return t
	}
	return b.origin + b.window(t)*b.period
}

// window returns how many windows begin after origin, up to t.
func (b *exactTerms) window(t int64) int64 {
	return new(big.Int).Div(big.NewInt(t-b.origin), big.NewInt(b.period)).Int64() // rounds towards minus infinity
}

// wrong reports whether ts is the mark of a wrong clock.
func (b *exactBucket) wrong(now int64) bool {
	step := int64(1)
	if b.windows {
		step = b.period
	}
	return b.stored && b.ts > b.floor(now)+step+modelMinute
}

// at returns the value at now and how far off the limiter's may be.
func (b *exactBucket) at(now int64) (*big.Rat, float64) {
	periods := big.NewRat(max(0, now-b.ts), b.period)
	if b.windows {
		periods = big.NewRat(max(0, b.window(now)-b.window(b.ts)), 1)
	}
	arrived := periods.Mul(periods, b.rate)
	value := sum(b.value, arrived)
	off := b.off + modelRounded*(abs(float(b.value))+float(arrived))
	if value.Cmp(b.capacity) <= 0 {
		return value, off
	}
	if float(sum(value, new(big.Rat).Neg(b.capacity))) > off {
		off = 0 // full, however it was rounded
	}
	return b.capacity, off
}

// spare returns how much more than cost could be taken with so much owed, and how far off that may be.
func (b *exactBucket) spare(now int64, cost float64, owed *big.Rat) (float64, float64) {
	if b.wrong(now) {
		mended := *b
		mended.ts = b.floor(now)
		b = &mended
	}
	value, off := b.at(now)
	return float(sum(sum(value, rat(-cost)), owed)), off + modelRounded*(abs(cost)+abs(float(value)))
}

// paid returns the first instant from now at which nothing is owed.
func (b *exactBucket) paid(now int64) int64 {
	if b.value.Sign() >= 0 {
		return now
	}
	periods := new(big.Rat).Quo(b.value, b.rate)
	if b.windows {
		n := new(big.Int).Div(periods.Num(), periods.Denom()) // minus the windows, rounded up
		return max(now, b.origin+(b.window(b.ts)-n.Int64())*b.period)
	}
	periods.Mul(periods, big.NewRat(b.period, 1))
	n := new(big.Int).Div(periods.Num(), periods.Denom())
	return max(now, b.ts-n.Int64())
}

// charge takes amount.
func (b *exactBucket) charge(now int64, amount float64) {
	if !b.stored { // full, since it was last looked at or before
		b.value, b.ts, b.off = b.capacity, b.floor(now), 0
	}
	value, off := b.at(now)
	if b.wrong(now) {
		b.ts = b.floor(now)
	}
	b.value, b.off, b.stored = sum(value, rat(-amount)), off+modelRounded*(abs(amount)+abs(float(value))), true
	b.ts = max(b.ts, b.floor(now))
}

// credit gives amount back, to fill the bucket to most where that is more than its capacity, and returns what that made of it. It
// credits no time: tokens since ts are counted later, at the rate in effect then.
func (b *exactBucket) credit(now int64, amount float64, most *big.Rat) float64 {
	if b.capacity.Cmp(most) > 0 {
		most = b.capacity
	}
	if !b.stored { // no row is a full bucket, and so is this under any terms
		b.value, b.ts, b.off, b.stored = most, modelAlways, 0, true
		return 0
	}
	if b.wrong(now) {
		b.ts = b.floor(now)
	}
	before, _ := b.at(now)
	if b.value.Cmp(most) > 0 {
		most = b.value
	}
	after := sum(b.value, rat(amount))
	b.off += modelRounded * (abs(amount) + abs(float(b.value)))
	if after.Cmp(most) >= 0 {
		after = most
	}
	b.value = after
	filled, _ := b.at(now)
	return max(0, float(sum(filled, new(big.Rat).Neg(before))))
}

func abs(f float64) float64 { return max(f, -f) }

// model is the state of the database. Its parts are copied to undo a transaction.
type model struct {
	buckets []exactBucket
	leases  []lease
	work    []*work
	backs   []back
}

func (m *model) clone() *model {
	c := &model{buckets: slices.Clone(m.buckets), leases: slices.Clone(m.leases), backs: slices.Clone(m.backs), work: slices.Clone(m.work)}
	for i := range c.leases {
		c.leases[i].costs, c.leases[i].work = maps.Clone(c.leases[i].costs), slices.Clone(c.leases[i].work)
		c.leases[i].terms = maps.Clone(c.leases[i].terms)
	}
	return c
}

// work is the work admitted by one bucket. It may run, as far as that bucket goes, at the moment ran of true time, when the
// database's clock, which may step back meanwhile, first shows ready.
type work struct {
	bucket  int
	cost    float64
	ready   int64
	due     bool
	ran     int64 // true time, once due
	windows int64 // that had begun by then
}

// back is the number of tokens returned to one bucket, at a moment of true time.
type back struct {
	bucket  int
	amount  float64
	moment  int64
	waiting []*work // work with a later ReadyAt at that time
	until   int64   // the last of those
}

// excess returns by how much the work of one bucket exceeds, in its worst interval, the promised amount:
//
//	capacity + rate * time + returned tokens,
//
// where a single cost above the capacity replaces it. Returned tokens count in intervals that contain their moment and begin no
// later than the last ReadyAt that was promised then. Time counts in windows begun, or microseconds, plus one, because reserved
// work may be paid by the end of one window and the start of the next, and is ready with the second. Work that waits for another
// limit is late here, which is not counted.
func (m *model) excess(i int) float64 {
	b := &m.buckets[i]
	capacity, rate := float(b.capacity), float(b.rate)
	worst := -capacity
	var all []*work
	for _, w := range m.work {
		if w.bucket == i && w.due {
			all = append(all, w)
		}
	}
	slices.SortFunc(all, func(a, b *work) int { return int(a.ran - b.ran) })
	for from, first := range all {
		given := m.given(i, first.ran)
		done, largest, back := 0.0, 0.0, 0.0
		for _, last := range all[from:] {
			for ; len(given) > 0 && given[0].moment <= last.ran; given = given[1:] {
				back += given[0].amount
			}
			done, largest = done+last.cost, max(largest, last.cost)
			arrived := rate * float64(last.ran-first.ran+1) / float64(b.period)
			if b.windows {
				arrived = rate * float64(last.windows-first.windows+1)
			}
			worst = max(worst, done-max(capacity, largest)-arrived-back)
		}
	}
	return worst
}

// given returns the tokens returned to a bucket while a ReadyAt of that moment or later was promised, or afterwards.
func (m *model) given(bucket int, from int64) (given []back) {
	for _, g := range m.backs {
		if g.bucket == bucket && g.until >= from {
			given = append(given, g)
		}
	}
	return given
}

// give records returned tokens.
func (m *model) give(bucket int, amount float64, moment int64) {
	if amount <= 0 {
		return
	}
	g := back{bucket: bucket, amount: amount, moment: moment}
	for _, w := range m.work {
		if w.bucket == bucket && !w.due {
			g.waiting = append(g.waiting, w)
		}
	}
	m.backs = append(m.backs, g)
}

// close sets until, when all is due.
func (m *model) close() {
	for i := range m.backs {
		g := &m.backs[i]
		g.until = g.moment
		for _, w := range g.waiting {
			g.until = max(g.until, w.ran)
		}
	}
}

// drop forgets work that will not run.
func (m *model) drop(dropped []*work) {
	m.work = slices.DeleteFunc(m.work, func(w *work) bool { return !w.due && slices.Contains(dropped, w) })
}
