package bucket

import "slices"

// SetNow gives the asks the terms in effect at Now. It reports whether a bucket has more rows under these: then the rows of Grown have to be
// read.
func (p *Page) SetNow(calls ...[]Ask) (grown bool) {
	if !slices.Contains(p.isRead, true) { // no answer has said what time it is
		return false
	}
	p.advance()
	for _, asks := range calls {
		for i := range asks {
			if a := &asks[i]; a.Terms.Eras != nil {
				rows := a.RowCount()
				a.SetNow(p.Now)
				grown = grown || a.RowCount() > rows
			}
		}
	}
	return grown
}

// Grown returns a page with the rows that the asks have since SetNow, still to be read. It remembers which rows were absent.
func (p *Page) Grown(calls ...[]Ask) *Page {
	all := NewPage(calls...)
	for i := range all.Rows {
		if at, known := p.Index(all.Rows[i].Key); known {
			all.isAbsent[i] = p.isAbsent[at]
		}
	}
	return all
}

// advance moves Now to the begin of the latest era that a row has seen, if that is less than a minute ahead: the statement may have
// waited for a call that was decided in this era.
func (p *Page) advance() {
	for i := range p.Rows {
		t, s := &p.Rows[i].Terms, p.states[i]
		if t.Eras == nil || !p.isRead[i] || p.isAbsent[i] || s.TS <= p.Now || t.FromFuture(s, p.Now) {
			continue
		}
		if since := t.At(s.TS).since(); since-p.Now <= ClockTolerance.Microseconds() {
			p.Now = max(p.Now, since)
		}
	}
}

// Settle brings the rows of the asks to the terms that SetNow has given these. It returns the buckets that were kept in another number of
// rows, and of which all rows are known to be settled.
func (p *Page) Settle(calls ...[]Ask) (levelled []*Ask) {
	for i := range p.Rows {
		if p.isAbsent[i] {
			p.states[i] = p.Rows[i].Terms.Full(p.Now)
		}
	}
	for _, asks := range calls {
		for i := range asks {
			a := &asks[i]
			if a.Terms.Eras == nil {
				continue
			}
			if _, held := p.Held(asks[i : i+1]); !held && p.settle(a) {
				levelled = append(levelled, a)
			}
		}
	}
	return levelled
}

// settle is Settle for one bucket, and reports whether it is one of those that Settle returns.
func (p *Page) settle(a *Ask) (wasLevelled bool) {
	first, _ := p.Index(a.FirstRow())
	found := p.states[first : first+a.RowCount()]
	absent := make([]bool, len(found))
	for i := range found {
		absent[i] = p.isNew(first + i)
	}
	wasLevelled = a.Terms.Reshaped() && a.Terms.IsLevelled(found, absent)
	all := a.Terms.Reshaped() && !wasLevelled && slices.Contains(absent, false) // rows are levelled together, or none is
	settled := a.Terms.SettleRows(found, absent, p.Now)
	full := a.Terms.OfShard().Full(p.Now)
	for i, state := range settled {
		if !all && (absent[i] && state.Equal(full) || state.Equal(found[i])) {
			found[i] = state
			continue
		}
		found[i], p.settled[first+i] = state, true
	}
	for i := len(settled); i < len(found); i++ {
		p.surplus[first+i] = all && !absent[i]
	}
	return wasLevelled
}
