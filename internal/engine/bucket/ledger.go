package bucket

import (
	"math"
	"slices"
)

// Ledger holds the rows of some buckets at one instant, and decides on calls, one after the other. All decisions in Go
// are made on a Ledger: for rows in memory, and for a preview of rows in Postgres. A Ledger does no input or output: an
// engine puts the rows in with Put, and gets the changes from Changes. It is for one goroutine at a time.
type Ledger struct {
	Now  int64 // the instant of the decisions
	Rows []Ask // one for each row, in the order of locking, with the terms of that row

	states, next []State // next is a row after the call that is being decided on
	marks        []mark
}

type mark struct{ absent, changed bool }

// NewLedger returns a ledger with the rows of the calls' buckets, which are still to be read.
func NewLedger(calls ...[]Ask) *Ledger {
	p := &Ledger{}
	p.Reset(calls...)
	return p
}

// Decide returns the answer of the next call, which finds the bucket as the answer found left it.
func (a *Ask) Decide(found Answer) Answer {
	asks := []Ask{*a}
	p := NewLedger(asks)
	p.Now = found.Now
	p.Put(0, found.State, false)
	return p.Take(asks, nil)[0]
}

// Reset makes p what NewLedger returns, in the memory that p has.
func (p *Ledger) Reset(calls ...[]Ask) {
	p.Rows = p.Rows[:0]
	for _, asks := range calls {
		p.Rows = append(p.Rows, asks...)
	}
	slices.SortFunc(p.Rows, func(a, b Ask) int { return a.Key.Compare(b.Key) })
	p.Rows = slices.CompactFunc(p.Rows, func(a, b Ask) bool { return a.Key == b.Key })
	n := len(p.Rows)
	p.states, p.next, p.marks = cleared(p.states, n), cleared(p.next, n), cleared(p.marks, n)
}

// cleared returns n zero values, in the memory of s if that is enough.
func cleared[T any](s []T, n int) []T {
	s = slices.Grow(s[:0], n)[:n]
	clear(s)
	return s
}

// Index returns the place of a row in Rows, and whether it is there.
func (p *Ledger) Index(k Key) (i int, found bool) {
	if len(p.Rows) == 1 { // the most frequent case
		return 0, p.Rows[0].Key == k
	}
	return slices.BinarySearchFunc(p.Rows, k, func(a Ask, k Key) int { return a.Key.Compare(k) })
}

// Put sets the result of reading the i-th row: its state, or that it is absent.
func (p *Ledger) Put(i int, s State, absent bool) { p.states[i], p.marks[i].absent = s, absent }

// isNew reports whether a row was absent, and has not changed since.
func (p *Ledger) isNew(i int) bool { return p.marks[i] == mark{absent: true} }

// Clone returns a copy, which may be changed alone.
func (p *Ledger) Clone() *Ledger {
	c := *p
	c.states, c.marks = slices.Clone(p.states), slices.Clone(p.marks)
	return &c
}

// State returns what the row of the bucket holds.
func (p *Ledger) State(a *Ask) State {
	i, _ := p.Index(a.Key)
	return p.states[i]
}

// Set sets what the row of the bucket holds.
func (p *Ledger) Set(a *Ask, s State) {
	i, _ := p.Index(a.Key)
	p.states[i], p.marks[i].changed = s, true
}

// decide decides on each ask. next is the row after it, if it is allowed.
func (p *Ledger) decide(asks []Ask, room []Answer) []Answer {
	answers := cleared(room, len(asks))
	for i := range asks {
		a, r := &asks[i], &answers[i]
		at, _ := p.Index(a.Key)
		after, enough := a.Terms.Kind.Take(a.Terms, p.states[at], p.Now, a.Cost, a.MinBalance)
		p.next[at], r.Now, r.Allowed = after, p.Now, enough && a.isSoonEnough(after, p.Now)
	}
	return answers
}

// Look decides on each ask, and takes nothing. The answers are put into room if that has the capacity.
func (p *Ledger) Look(asks []Ask, room []Answer) []Answer {
	answers := p.decide(asks, room)
	for i := range asks {
		at, _ := p.Index(asks[i].Key)
		answers[i].State, answers[i].Absent = p.states[at], p.marks[at].absent
	}
	return answers
}

// LookAt resets p to the rows of the asks, which were found in the order of locking, and returns what Look does. The
// asks get the terms in effect at the instant of the answers.
func (p *Ledger) LookAt(asks []Ask, found, room []Answer) []Answer {
	p.Reset(asks)
	for i := range p.Rows {
		p.Put(i, found[i].State, found[i].Absent)
	}
	p.Now = found[0].Now
	p.SetNow(asks)
	p.Settle(asks)
	return p.Look(asks, room)
}

// Take decides on a call as if it came after all earlier calls on the ledger: it takes from all of the buckets, or from
// none. Either way it brings rows back to the present that a wrong clock has left in the future. A call whose costs are
// all 0 changes nothing. The answers are put into room if that has the capacity.
func (p *Ledger) Take(asks []Ask, room []Answer) []Answer {
	if AllCostless(asks) {
		return p.Look(asks, room)
	}
	answers := p.decide(asks, room)
	allowed := AllAllowed(answers)
	if allowed {
		AlignFences(asks, func(i int) *State {
			at, _ := p.Index(asks[i].Key)
			return &p.next[at]
		})
	}
	for i := range asks {
		a := &asks[i]
		at, _ := p.Index(a.Key)
		next := p.states[at]
		if allowed {
			next = p.next[at]
		}
		if next = a.Terms.FixClock(next, p.Now); !next.Equal(p.states[at]) {
			p.Set(a, next)
		}
		answers[i].State = next
	}
	return answers
}

// Whenever is the instant of tokens that may be given back at any time.
const Whenever = int64(math.MaxInt64)

// CreditUntil returns the begin of the last step in which tokens may be given back to the bucket that were taken at an
// instant. A Reset since then has given them back already.
func (a *Ask) CreditUntil(taken int64) int64 {
	switch {
	case taken == Whenever:
		return MaxInstant
	case taken < a.Terms.Revisions.lastReset(a.Terms.Revision):
		return MinInstant
	}
	return a.Terms.Kind.CreditUntil(a.Terms, taken)
}

// Charge takes amount from a bucket, also if it has fewer tokens. A negative amount is given back, if the current step
// still takes back tokens that were taken at an instant; see CreditUntil.
func (p *Ledger) Charge(a *Ask, amount float64, taken int64) {
	if amount == 0 {
		return
	}
	i, _ := p.Index(a.Key)
	t, s := &a.Terms, p.states[i]
	if amount > 0 {
		p.Set(a, t.Kind.Charge(*t, t.FixClock(s, p.Now), p.Now, amount))
		return
	}
	if p.isNew(i) { // it is full under all terms, and was before
		full := max(s.Value, a.CreditCap)
		s = State{Value: full, TS: min(t.Begin(p.Now), LongAgo), Capacity: full}
	}
	if after, given := t.Kind.Credit(*t, s, p.Now, -amount, a.CreditCap, a.CreditUntil(taken)); given || !p.isNew(i) &&
		!after.Equal(s) {
		p.Set(a, after)
	}
}

// ChargeUntil charges a bucket so much that it gives nothing before the instant until, unless it owes as much already.
// It returns what it has charged, and the first instant at which it owes nothing, which is after until if it owed more,
// or gives its tokens in steps.
func (p *Ledger) ChargeUntil(a *Ask, until int64) (amounts []float64, end int64) {
	t, unbounded := &a.Terms, a.Terms
	unbounded.Capacity = math.MaxFloat64
	arriving := func(at int64) float64 { // from the current step on
		return t.Kind.Tokens(unbounded, State{TS: t.Begin(p.Now)}, at)
	}
	end = p.Now + t.wait(p.State(a), p.Now, 0, 0).Microseconds()
	const mostRounds = 4 // the second only adds what was lost by rounding, or a step
	for round := 0; end < until && round < mostRounds; round++ {
		amount := arriving(t.step(p.Now, 1)) * float64(round)
		if round == 0 {
			amount = max(t.Kind.Tokens(*t, p.State(a), p.Now)+arriving(until), math.SmallestNonzeroFloat64)
		}
		p.Charge(a, amount, Whenever)
		amounts = append(amounts, amount)
		end = p.Now + t.wait(p.State(a), p.Now, 0, 0).Microseconds()
	}
	return amounts, end
}

// Fill sets the buckets to their capacity.
func (p *Ledger) Fill(asks []Ask) {
	for i := range asks {
		a := &asks[i]
		p.Set(a, a.Terms.Kind.Fill(a.Terms, p.State(a), p.Now))
	}
}

// ChangeLeases renews the leases with that fencing number by lengths, all or none, or, where lengths is nil, releases
// those that are held. It returns which were held, and the ends of renewed leases. As Take does, it corrects rows that
// a wrong clock has left in the future, also if a lease is lost.
func (p *Ledger) ChangeLeases(asks []Ask, fence int64, lengths []int64) (held []bool, ends []int64) {
	held, ends = make([]bool, len(asks)), make([]int64, len(asks))
	fixed, after := make([]State, len(asks)), make([]State, len(asks))
	for i := range asks {
		a := &asks[i]
		fixed[i] = a.Terms.FixClock(p.State(a), p.Now)
		if lengths == nil {
			after[i], held[i] = fixed[i].ReleaseLease(p.Now, fence)
		} else {
			after[i], ends[i], held[i] = fixed[i].RenewLease(p.Now, fence, lengths[i])
		}
	}
	renews := lengths != nil && !slices.Contains(held, false)
	for i := range asks {
		next := fixed[i]
		if held[i] && (lengths == nil || renews) {
			next = after[i]
		}
		if !next.Equal(p.State(&asks[i])) {
			p.Set(&asks[i], next)
		}
	}
	return held, ends
}

// FromFuture returns the rows that a wrong clock has left in the future.
func (p *Ledger) FromFuture() (rows []Key) {
	for i := range p.Rows {
		if p.Rows[i].Terms.FromFuture(p.states[i], p.Now) {
			rows = append(rows, p.Rows[i].Key)
		}
	}
	return rows
}

// HasChanged reports whether a row must be written.
func (p *Ledger) HasChanged() bool {
	return slices.ContainsFunc(p.marks, func(m mark) bool { return m.changed })
}

// Changes calls save for each changed row, in the order of locking.
func (p *Ledger) Changes(save func(k Key, s State)) {
	for i := range p.Rows {
		if p.marks[i].changed {
			save(p.Rows[i].Key, p.states[i])
		}
	}
}
