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

// tokens returns how many tokens a bucket or a row has after the change from one capacity to another, if it had so many.
func (c Change) tokens(tokens, before, after float64) float64 {
	switch {
	case c == Reset || tokens >= before:
		return after
	case c == Scale && before > 0:
		tokens *= after / before
	case c == Add:
		tokens += after - before
	}
	return min(after, tokens)
}

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

// span returns the instants at which an era and the next one begin.
func (e *Eras) span(era int32) (since, until int64) {
	since, until = math.MinInt64, math.MaxInt64
	if e == nil {
		return since, until
	}
	if int(era)+1 < len(e.eras) {
		until = e.eras[era+1].From
	}
	return e.eras[era].From, until
}

// DebtGrowth returns how many times a debt may grow by the changes of all eras.
func (e *Eras) DebtGrowth() float64 {
	growth := 1.0
	for i := 1; e != nil && i < len(e.eras); i++ {
		before, after := e.eras[i-1].Terms.Capacity, e.eras[i].Terms.Capacity
		if e.eras[i].Change == Scale && before > 0 {
			growth *= max(1, after/before)
		}
	}
	return growth
}

// lastReset returns when the latest era up to this one began that filled the buckets.
func (e *Eras) lastReset(era int32) int64 {
	for era > 0 && e.eras[era].Change != Reset {
		era--
	}
	return e.eras[era].From
}

// Mode returns the mode of the era of the terms; 0: no other era has another mode.
func (t *Terms) Mode() uint8 {
	if t.Eras == nil || !t.Eras.modes {
		return 0
	}
	return t.Eras.eras[t.Era].Mode
}

// AnyInOtherMode reports whether the terms of one of the asks are of an era with another mode than the ask was made for.
func AnyInOtherMode(asks []Ask) bool {
	return anyOf(asks, func(a *Ask) bool { return a.Mode != 0 && a.Terms.Mode() != a.Mode })
}

// since returns the instant at which the era of the terms begins.
func (t *Terms) since() int64 {
	since, _ := t.Eras.span(t.Era)
	return since
}

// Span returns the instant from which the terms hold, and that from which they hold no more.
func (t Terms) Span() (since, until int64) {
	since, until = t.Eras.span(t.Era)
	first, end := t.Kind.Span(t)
	return max(since, first), min(until, end)
}

// HasSpan reports whether other terms hold at other instants.
func (t *Terms) HasSpan() bool {
	since, until := t.Span()
	return since > math.MinInt64 || until < math.MaxInt64
}

// At returns the terms that hold at an instant, of the same bucket or row.
func (t Terms) At(now int64) Terms {
	if since, until := t.Span(); now >= since && now < until {
		return t
	}
	if t.Eras != nil {
		t = t.of(t.Eras.Holding(now))
	}
	return t.On(now)
}

// of returns the terms of an era as they are for the bucket or the row that t is of.
func (t *Terms) of(era Terms) Terms {
	era = era.Seeded(t.Seed)
	if t.OfRow {
		era = era.OfShard()
	}
	return era
}

// NeedsSeed reports whether the terms, or those that hold at another instant, have a phase that is derived from the key.
func (t *Terms) NeedsSeed() bool { return t.PhaseByKey || t.Eras != nil && t.Eras.seeded }

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

// rowsEver returns how many rows the bucket or the row ever has, because another era may be in effect.
func (t *Terms) rowsEver() int {
	if t.Eras != nil && !t.OfRow {
		return int(t.Eras.rows)
	}
	return int(max(t.Shards, 1))
}

// Settle returns the state of a row under the terms that hold now. What arrived in each era up to its end is counted by
// its terms, and what became of the tokens then is what the change says.
func (t Terms) Settle(s State) State {
	if s.TS >= t.since() {
		return s
	}
	for i := t.Eras.Holding(s.TS).Era + 1; i <= t.Era; i++ {
		era := &t.Eras.eras[i]
		before, after := t.of(t.Eras.eras[i-1].Terms).On(era.From-1), t.of(era.Terms).On(era.From)
		s = after.Kind.Enter(after, before, s, era.From, era.Change)
		if Holds(&before) && !Holds(&after) {
			s = s.endLeases()
		}
	}
	return s
}

// Outside reports whether a statement says nothing on the row that it found: the terms of the ask are not in effect at the instant of the
// answer, or the row is of another era, or not as its kind leaves it. Nothing was taken then.
func (a *Ask) Outside(r Answer) bool {
	if r.Allowed {
		return false
	}
	since, until := a.Terms.Span()
	return r.Now < since || r.Now >= until || r.State.TS < since || r.State.TS >= until || !a.Terms.Kind.IsPlain(a.Terms, r.State, r.Now)
}

// AnySpan reports whether one of n terms has a span.
func AnySpan(n int, terms func(i int) *Terms) bool {
	for i := range n {
		if terms(i).HasSpan() {
			return true
		}
	}
	return false
}
