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

	Origin    int32 // which era it is of those that it was made from; see Terms.OnCalendar
	Continues bool  // whether it is the same calendar's as the era before, in other windows
	Unknown   bool  // whether it is not known when the windows begin in it
	Follows   Calendar
}

// Eras are the terms of a limit at all instants. They do not change once they are made.
type Eras struct {
	eras     []Era
	reshaped []bool // whether in each era rows may be left that can be settled together only
	seeded   bool   // whether the phase of any is derived from the key

	calendars bool // whether any has a Calendar
	modes     bool // whether their modes differ
}

// NewEras returns the eras, which are in the order of their From: the first has always held. The terms of each know the
// others by Eras.
func NewEras(eras []Era) *Eras {
	e := &Eras{eras: slices.Clone(eras), reshaped: make([]bool, len(eras))}
	for i := range e.eras {
		era := &e.eras[i]
		era.Terms.Eras, era.Terms.Era, era.Terms.Shards = e, int32(i), max(era.Terms.Shards, 1)
		e.seeded, e.calendars = e.seeded || era.Terms.PhaseByKey, e.calendars || era.Terms.Calendar.Unit != 0
		if i == 0 {
			era.From = math.MinInt64
			continue
		}
		before := &e.eras[i-1]
		e.modes = e.modes || era.Mode != before.Mode
		e.reshaped[i] = era.Change != Reset && (e.reshaped[i-1] || era.isOfAllRows(before))
	}
	return e
}

// isOfAllRows reports whether a bucket is brought to the era as a whole, and not row by row: where the number of rows changes,
// and where a row that is full would gain what the bucket is not to.
func (e *Era) isOfAllRows(before *Era) bool {
	n, gains := e.Terms.Shards, e.Terms.Capacity > before.Terms.Capacity
	return e.Change != Reset && (n != before.Terms.Shards || n > 1 && e.Change == Keep && gains)
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
func (e *Eras) DebtGrowth() float64 {
	growth := 1.0
	for i := 1; i < len(e.eras); i++ {
		before, after := e.eras[i-1].Terms.Capacity, e.eras[i].Terms.Capacity
		if e.eras[i].Change == Scale && before > 0 {
			growth *= max(1, after/before)
		}
	}
	return growth
}

// EverReshaped reports whether Terms of any era are Reshaped.
func (e *Eras) EverReshaped() bool { return slices.Contains(e.reshaped, true) }

// Mode returns the mode of the era of the terms; 0: no other era has another mode.
func (t Terms) Mode() uint8 {
	if t.Eras == nil || !t.Eras.modes {
		return 0
	}
	return t.Eras.eras[t.Era].Mode
}

// Span returns the instant from which the terms hold, and that from which they hold no more.
func (t Terms) Span() (since, until int64) {
	since, until = math.MinInt64, math.MaxInt64
	if t.Eras != nil {
		since = t.Eras.eras[t.Era].From
		if next := int(t.Era) + 1; next < len(t.Eras.eras) {
			until = t.Eras.eras[next].From
		}
	}
	return since, until
}

// since returns the instant from which the terms hold.
func (t Terms) since() int64 {
	since, _ := t.Span()
	return since
}

// Reshaped reports whether rows of the bucket may be missing, or old, although it is not full, because it was kept in
// another number of rows, or of a smaller capacity: those have to be looked at as a whole.
func (t Terms) Reshaped() bool {
	return t.Eras != nil && !t.Levelled && !t.OfRow && t.Eras.reshaped[t.Era]
}

// At returns the terms that hold at an instant, of the same bucket or row.
func (t Terms) At(now int64) Terms {
	if since, until := t.Span(); now >= since && now < until {
		return t
	}
	return t.of(t.Eras.Holding(now))
}

// Within returns the terms of an era of other eras, as they are for the bucket of t.
func (t Terms) Within(era Terms) Terms { return t.of(era) }

// of returns the terms of an era as they are for the bucket or the row that t is of.
func (t Terms) of(era Terms) Terms {
	era = era.Seeded(t.Seed)
	if t.OfRow {
		era = era.OfShard()
	}
	return era
}

// NeedsSeed reports whether the terms, or those that hold at another instant, have a phase that is derived from the key.
func (t Terms) NeedsSeed() bool { return t.PhaseByKey || t.Eras != nil && t.Eras.seeded }

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

// MostShards returns how many rows may hold what the bucket holds.
func (t Terms) MostShards() int32 {
	most := t.Shards
	for i := int32(0); t.Reshaped() && i < t.Era; i++ {
		most = max(most, t.Eras.eras[i].Terms.Shards)
	}
	return most
}

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

// isSettled reports whether the state of a row is of the era of the terms, and not of one before it.
func (t Terms) isSettled(s State) bool { return t.Eras == nil || s.TS >= t.since() }

// Settle returns the state of a row under the terms that hold now. What arrived in each era up to its end is counted by
// its terms, and what became of the tokens then is what the change says. The number of rows stays the same in all eras
// that s has seen, or else SettleRows is for it.
func (t Terms) Settle(s State) State {
	if t.isSettled(s) {
		return s
	}
	for i := t.Eras.Holding(s.TS).Era + 1; i <= t.Era; i++ {
		from, before, after := t.Eras.eras[i].From, t.within(i-1), t.within(i)
		s = after.enterRow(before, s, from)
	}
	return s
}

// SettleRows is Settle for the rows of a bucket: found are MostShards of them, and absent tells which of those are not
// there, as a full one is. It returns the Shards rows of the bucket now.
func (t Terms) SettleRows(found []State, absent []bool, now int64) []State {
	rows, missing := slices.Clone(found), slices.Clone(absent)
	for len(rows) < int(t.MostShards()) { // not read: the terms have begun to hold meanwhile
		rows, missing = append(rows, State{}), append(missing, true)
	}
	if t.Eras != nil && !t.Levelled {
		first := t.lastLevelled(rows, missing)
		for i := range rows {
			missing[i] = missing[i] || rows[i].TS < t.Eras.eras[first].From
		}
		for i := first + 1; i <= t.Era; i++ {
			t.within(i).enter(rows, missing, t.within(i-1))
		}
	}
	rows = rows[:max(t.Shards, 1)]
	full := t.OfShard().Full(now)
	for i := range rows {
		if missing[i] {
			rows[i] = full
		}
	}
	return rows
}

// IsLevelled reports whether all rows of the bucket are there, and settled in the era of t: what was held in another number
// of rows has been spread over them.
func (t Terms) IsLevelled(rows []State, absent []bool) bool {
	for i := range t.Shards {
		if absent[i] || !t.isSettled(rows[i]) {
			return false
		}
	}
	return true
}

// lastReset returns the latest era up to that of t which began with full buckets, or the first.
func (t Terms) lastReset() int32 {
	for i := t.Era; i > 0; i-- {
		if t.Eras.eras[i].Change == Reset {
			return i
		}
	}
	return 0
}

// lastLevelled returns the latest era up to that of t which began with full buckets, or which changed the number of rows and
// in which they were levelled; or else the first.
func (t Terms) lastLevelled(rows []State, missing []bool) int32 {
	reset := t.lastReset()
	for i := t.Era; i > reset; i-- {
		if t.Eras.eras[i].isOfAllRows(&t.Eras.eras[i-1]) && t.within(i).IsLevelled(rows, missing) {
			return i
		}
	}
	return reset
}

// enter settles the rows of a bucket at the beginning of the era of t, from the era before.
func (t Terms) enter(rows []State, missing []bool, before Terms) {
	if t.Eras.eras[t.Era].isOfAllRows(&t.Eras.eras[before.Era]) {
		t.reshape(rows, missing, before)
		return
	}
	from, part, partBefore := t.since(), t.OfShard(), before.OfShard()
	for i := range rows {
		switch {
		case i >= int(t.Shards): // of a time when there were more
			missing[i] = true
		case !missing[i] && rows[i].TS < from:
			rows[i] = part.enterRow(partBefore, rows[i], from)
		}
	}
}

// reshape is enter for an era that a bucket enters as a whole: what the rows held together is spread evenly over the new ones.
func (t Terms) reshape(rows []State, missing []bool, before Terms) {
	from, known := t.since(), false
	for i := range before.Shards {
		known = known || !missing[i]
	}
	held := slices.Clone(rows[:before.Shards])
	for i := range held {
		if missing[i] {
			held[i] = before.OfShard().Full(from)
		}
	}
	each := t.changed(before.TokensOf(held, from), before) / float64(t.Shards)
	for i := range rows {
		missing[i] = !known || i >= int(t.Shards)
		rows[i] = t.held(each, from)
	}
}

// enterRow returns the state of a row at the beginning of the era of t, from the era before.
func (t Terms) enterRow(before Terms, s State, from int64) State {
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

// held returns the state of a row of which only the tokens are known.
func (t Terms) held(tokens float64, from int64) State {
	s := State{Value: tokens, TS: from}
	if t.Rule != nil {
		asSteps := t
		asSteps.Rule, asSteps.Rate, asSteps.Step, asSteps.Steps = nil, 0, 1, 1
		s = t.Rule.Enter(t, asSteps, s, from, Keep)
	}
	return s
}
