package bucket

import (
	"math"
	"slices"
)

// Change says how the tokens of a bucket change when other terms begin to hold.
type Change uint8

const (
	// Keep leaves the tokens as they are, up to the new capacity.
	Keep Change = iota
	// Carry keeps the used tokens. Less is left after a cut, but no tokens are owed because of it.
	Carry
	// Scale keeps their share of the capacity.
	Scale
	// Add adds the difference of the capacities, which may be negative.
	Add
	// Reset fills the bucket.
	Reset
)

// tokens returns the tokens of a bucket or a row after the change, which is no Reset, from one capacity to another.
func (c Change) tokens(tokens, before, after float64) float64 {
	switch {
	case tokens >= before:
		return after
	case c == Scale && before > 0:
		tokens *= after / before
	case c == Carry:
		tokens = max(min(tokens, 0), tokens+after-before)
	case c == Add:
		tokens += after - before
	}
	return min(after, tokens)
}

// Revision is terms and the instant from which they hold, up to the next revision's.
type Revision struct {
	From   int64
	Terms  Terms
	Change Change // at From; unused in the first revision
}

// Revisions are the terms of a limit at all instants. They do not change once they are made.
type Revisions struct {
	revisions []Revision
	seeded    bool // whether the phase of any is derived from the key
}

// NewRevisions returns the revisions, which are in the order of their From: the first has always held. The terms of
// each know the others by Revisions. A change to another kind of limit must be a Reset.
func NewRevisions(revisions []Revision) *Revisions {
	e := &Revisions{revisions: slices.Clone(revisions)}
	for i := range e.revisions {
		revision := &e.revisions[i]
		revision.Terms.Revisions, revision.Terms.Revision = e, int32(i)
		e.seeded = e.seeded || revision.Terms.PhaseByKey
	}
	e.revisions[0].From = math.MinInt64
	return e
}

// Holding returns the terms that hold at an instant.
func (e *Revisions) Holding(now int64) Terms {
	i := len(e.revisions) - 1
	for i > 0 && e.revisions[i].From > now {
		i--
	}
	return e.revisions[i].Terms
}

// span returns the instants at which a revision and the next one begin.
func (e *Revisions) span(revision int32) (since, until int64) {
	if e == nil || int(revision)+1 == len(e.revisions) {
		return e.since(revision), math.MaxInt64
	}
	return e.since(revision), e.since(revision + 1)
}

func (e *Revisions) since(revision int32) int64 {
	if e == nil {
		return math.MinInt64
	}
	return e.revisions[revision].From
}

// DebtGrowth returns how many times what a bucket owes may grow by the changes of all revisions. A bucket may enter a
// revision from any earlier one.
func (e *Revisions) DebtGrowth() float64 {
	growth, least := 1.0, math.Inf(1)
	for i := 1; e != nil && i < len(e.revisions); i++ {
		if before := e.revisions[i-1].Terms.Capacity; before > 0 {
			least = min(least, before)
		}
		if e.revisions[i].Change == Scale {
			growth *= max(1, e.revisions[i].Terms.Capacity/least)
		}
	}
	return growth
}

// lastReset returns when the latest revision up to this one began that filled the buckets.
func (e *Revisions) lastReset(revision int32) int64 {
	for revision > 0 && e.revisions[revision].Change != Reset {
		revision--
	}
	return e.since(revision)
}

// LastReset returns when the latest policy up to this one began that filled the buckets.
func (t *Terms) LastReset() int64 { return t.Revisions.lastReset(t.Revision) }

// Span returns the instant from which the terms hold, and that from which they hold no more.
func (t Terms) Span() (since, until int64) {
	since, until = t.Revisions.span(t.Revision)
	if t.Windows != nil {
		since, until = max(since, t.since), min(until, t.until)
	}
	return since, until
}

// HasSpan reports whether other terms hold at other instants.
func (t *Terms) HasSpan() bool {
	since, until := t.Span()
	return since > math.MinInt64 || until < math.MaxInt64
}

// At returns the terms that hold at an instant, of the same bucket. Terms of slots stay terms of slots, and others
// stay others, because a call for one cannot become a call for the other.
func (t Terms) At(now int64) Terms {
	if since, until := t.Span(); now >= since && now < until {
		return t
	}
	if t.Revisions != nil {
		if then := t.Revisions.Holding(now); Holds(&then) == Holds(&t) {
			t = then.Seeded(t.Seed)
		}
	}
	return t.On(now)
}

// IsSeeded reports whether the terms, or the terms of another revision, have a phase that is derived from the key.
func IsSeeded(t *Terms) bool { return t.PhaseByKey || t.Revisions != nil && t.Revisions.seeded }

// Seeded returns the terms with the phase derived from seed, if they have such a phase.
func (t Terms) Seeded(seed uint64) Terms {
	if t.PhaseByKey {
		t.Phase = PhaseOf(int64(seed%uint64(t.Step)), t.Step)
	}
	if t.Revisions != nil {
		t.Seed = seed
	}
	return t
}

// Settle returns the state of a row under the terms that hold now. The revision in which the row was written counts up
// to the begin of the revision of t, and the change to that says what becomes of the tokens. Revisions between the two
// do not count, as the row has never seen them, but a Reset among them fills it. A row that another plan wrote is
// brought to the terms of its time first.
func (t Terms) Settle(s State) State {
	since := t.Revisions.since(t.Revision)
	switch {
	case s.TS >= since:
		return t.Carry(s)
	case s.TS < t.Revisions.lastReset(t.Revision):
		return t.Kind.Fill(t.On(since), s.endLeases(), since)
	}
	before := t.Revisions.Holding(s.TS).Seeded(t.Seed).On(since - 1)
	return t.Kind.Enter(t.On(since), before, before.Carry(s), since, t.Revisions.revisions[t.Revision].Change)
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

// SetNow gives the asks the terms in effect at Now.
func (p *Ledger) SetNow(calls ...[]Ask) {
	p.advance()
	for _, asks := range calls {
		for i := range asks {
			if a := &asks[i]; a.Terms.HasSpan() {
				a.SetNow(p.Now)
			}
		}
	}
}

// advance moves Now to the begin of the latest Span that a row has seen, if that is less than a minute ahead. The
// statement may have waited for a call that was decided in that Span. Seen from there, other rows may be, too.
func (p *Ledger) advance() {
	for i := 0; i < len(p.Rows); i++ {
		t, s := &p.Rows[i].Terms, p.states[i]
		if !t.HasSpan() || p.marks[i].absent || s.TS <= p.Now || t.FromFuture(s, p.Now) {
			continue
		}
		if since, _ := t.At(p.Now).At(s.TS).Span(); since > p.Now && since-p.Now <= ClockTolerance.Microseconds() {
			p.Now, i = since, -1
		}
	}
}

// Settle brings the rows of the asks to the terms that SetNow has given these. They are written with the bucket, if a
// call changes it.
func (p *Ledger) Settle(calls ...[]Ask) {
	for i := range p.Rows {
		if p.marks[i].absent {
			p.states[i] = p.Rows[i].Terms.Full(p.Now)
		}
	}
	for _, asks := range calls {
		for i := range asks {
			if a := &asks[i]; a.Terms.Revisions != nil || a.Terms.IsQuota() {
				if at, _ := p.Index(a.Key); p.isNew(at) {
					p.states[at] = a.Terms.Full(p.Now)
				} else {
					p.states[at] = a.Terms.Settle(p.states[at])
				}
			}
		}
	}
}
