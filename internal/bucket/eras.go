package bucket

import (
	"math"
	"slices"
)

// Change is what becomes of the tokens of a bucket when other terms begin to hold.
type Change uint8

const (
	// Keep leaves the tokens as they are, up to the new capacity.
	Keep Change = iota
	// Scale keeps their share of the capacity.
	Scale
	// Add adds what the capacity gains, or takes away what it loses.
	Add
	// Reset fills the bucket.
	Reset
)

// Era is terms and the instant from which they hold, up to the next era's.
type Era struct {
	From   int64
	Terms  Terms
	Change Change // at From; that of the first era does not matter
	Mode   uint8  // a number for each mode of a rule, with slots or with tokens; see Ask.Mode
}

// Eras are the terms of a limit at all instants. They do not change once they are made.
type Eras struct {
	eras   []Era
	rows   int32 // the highest number of rows that a bucket has in any of them
	seeded bool  // whether the phase of any is derived from the key
	modes  bool  // whether their modes differ
}

// NewEras returns the eras, which are in the order of their From: the first has always held. The terms of each know the
// others by Eras. The rows of a bucket enter an era one by one, so each change must be one that IsByRow reports.
func NewEras(eras []Era) *Eras {
	e := &Eras{eras: slices.Clone(eras)}
	for i := range e.eras {
		era := &e.eras[i]
		era.Terms.Eras, era.Terms.Era, era.Terms.Shards = e, int32(i), max(era.Terms.Shards, 1)
		e.rows = max(e.rows, era.Terms.Shards)
		e.seeded = e.seeded || era.Terms.PhaseByKey
		if i == 0 {
			era.From = math.MinInt64
			continue
		}
		e.modes = e.modes || era.Mode != e.eras[i-1].Mode
	}
	return e
}

// Holding returns the terms that hold at an instant.
func (e *Eras) Holding(now int64) Terms {
	i := len(e.eras) - 1
	for i > 0 && e.eras[i].From > now {
		i--
	}
	return e.eras[i].Terms
}

// DebtGrowth returns how many times a debt may grow by the changes of all eras.
func (t Terms) DebtGrowth() float64 {
	growth := 1.0
	for i := 1; t.Eras != nil && i < len(t.Eras.eras); i++ {
		before, after := t.Eras.eras[i-1].Terms.Capacity, t.Eras.eras[i].Terms.Capacity
		if t.Eras.eras[i].Change == Scale && before > 0 {
			growth *= max(1, after/before)
		}
	}
	return growth
}

// Mode returns the mode of the era of the terms; 0: no other era has another mode.
func (t Terms) Mode() uint8 {
	if t.Eras == nil || !t.Eras.modes {
		return 0
	}
	return t.Eras.eras[t.Era].Mode
}

// Span returns the instant from which the terms hold, and that from which they hold no more. Terms with a Calendar hold as long as its
// windows have the length Step.
func (t Terms) Span() (since, until int64) {
	return t.spanOfWindows(t.since(), t.until())
}

// until returns the instant at which the next era begins.
func (t Terms) until() int64 {
	if t.Eras == nil || int(t.Era)+1 == len(t.Eras.eras) {
		return math.MaxInt64
	}
	return t.Eras.eras[t.Era+1].From
}

// At returns the terms that hold at an instant, of the same bucket or row.
func (t Terms) At(now int64) Terms {
	if since, until := t.Span(); now >= since && now < until {
		return t
	}
	if t.Eras != nil {
		t = t.of(t.Eras.Holding(now))
	}
	return t.OnWindows(now)
}

// of returns the terms of an era as they are for the bucket or the row that t is of.
func (t Terms) of(era Terms) Terms {
	era = era.Seeded(t.Seed)
	if t.OfRow {
		era = era.OfShard()
	}
	return era
}

// Seeded returns the terms with the phase that follows from seed, where they have such a one.
func (t Terms) Seeded(seed uint64) Terms {
	if t.PhaseByKey {
		t.Phase = PhaseOf(int64(seed%uint64(t.Step)), t.Step)
	}
	if t.Eras != nil {
		t.Seed = seed
	}
	return t
}

// within returns the terms of the i-th era.
func (t Terms) within(i int32) Terms { return t.of(t.Eras.eras[i].Terms) }

// changed returns the tokens that a bucket or a row has under the terms t of an era, at its first instant, when it had so
// many under the terms before.
func (t Terms) changed(tokens float64, before Terms) float64 {
	return t.changedBy(t.Eras.eras[t.Era].Change, tokens, before)
}

// changedBy is changed for a change that may be another than that of the era.
func (t Terms) changedBy(change Change, tokens float64, before Terms) float64 {
	switch {
	case change == Reset || tokens >= before.Capacity:
		return t.Capacity
	case change == Scale && before.Capacity > 0:
		tokens *= t.Capacity / before.Capacity
	case change == Add:
		tokens += t.Capacity - before.Capacity
	}
	return min(t.Capacity, tokens)
}

// Settle returns the state of a row under the terms that hold now. What arrived in each era up to its end is counted by
// its terms, and what became of the tokens then is what the change says.
func (t Terms) Settle(s State) State {
	if s.TS >= t.since() {
		return s
	}
	for i := t.Eras.Holding(s.TS).Era + 1; i <= t.Era; i++ {
		from, before, after := t.Eras.eras[i].From, t.within(i-1), t.within(i)
		s = after.enterRow(before, s, from)
	}
	return s
}

// lastReset returns when the latest era up to that of t began that filled the buckets.
func (t Terms) lastReset() int64 {
	i := t.Era
	for i > 0 && t.Eras.eras[i].Change != Reset {
		i--
	}
	return t.Eras.eras[i].From
}

// enterRow returns the state of a row at the beginning of the era of t, from the era before.
func (t Terms) enterRow(before Terms, s State, from int64) State {
	t, before = t.OnWindows(from), before.OnWindows(from-1)
	entered := State{TS: from}
	if t.Rule != nil {
		entered = t.Rule.Enter(t, before, s, from, t.Eras.eras[t.Era].Change)
	} else {
		entered.Value = t.changed(before.Tokens(s, from), before)
	}
	if before.Holds() && s.lastFence() > 0 { // what was held is no more, but its numbers are not given again
		s.Parts = &Parts{Leases: []int64{s.lastFence()}}
	}
	return t.keepingLeases(entered, s)
}

// Outside reports whether the terms of the ask say nothing on what was found: they do not hold at the instant of the answer,
// or the row is of another era. Nothing was taken then.
func (a *Ask) Outside(r Answer) bool {
	if !a.Terms.HasSpan() || r.Allowed {
		return false
	}
	since, until := a.Terms.Span()
	return r.Now < since || r.Now >= until || r.State.TS < since || r.State.TS >= until
}

// HasSpan reports whether other terms hold at other instants: in another era, or in other windows of the calendar.
func (t *Terms) HasSpan() bool { return t.Eras != nil || t.Calendar.Zone != nil }

// AnySpan reports whether one of n terms has a span.
func AnySpan(n int, terms func(i int) *Terms) bool {
	for i := range n {
		if terms(i).HasSpan() {
			return true
		}
	}
	return false
}
