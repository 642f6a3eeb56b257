package bucket

import "slices"

// SetNow gives the asks the terms in effect at Now.
func (p *Page) SetNow(calls ...[]Ask) {
	if !slices.ContainsFunc(p.marks, func(m mark) bool { return m.read }) { // no answer has said what time it is
		return
	}
	p.advance()
	for _, asks := range calls {
		for i := range asks {
			if a := &asks[i]; a.Terms.HasSpan() {
				a.SetNow(p.Now)
			}
		}
	}
}

// advance moves Now to the begin of the latest Span that a row has seen, if that is less than a minute ahead. The statement may
// have waited for a call that was decided in that Span.
func (p *Page) advance() {
	for i := range p.Rows {
		t, s := &p.Rows[i].Terms, p.states[i]
		if !t.HasSpan() || !p.marks[i].read || p.marks[i].absent || s.TS <= p.Now || t.FromFuture(s, p.Now) {
			continue
		}
		if since, _ := t.At(s.TS).Span(); since-p.Now <= ClockTolerance.Microseconds() {
			p.Now = max(p.Now, since)
		}
	}
}

// Settle brings the rows of the asks to the terms that SetNow has given these. They are written with the bucket, if a call changes it.
func (p *Page) Settle(calls ...[]Ask) {
	for i := range p.Rows {
		if p.marks[i].absent {
			p.states[i] = p.Rows[i].Terms.Full(p.Now)
		}
	}
	for _, asks := range calls {
		for i := range asks {
			if a := &asks[i]; a.Terms.Eras != nil {
				if _, held := p.Held(asks[i : i+1]); !held {
					p.settle(a)
				}
			}
		}
	}
}

// settle is Settle for one bucket.
func (p *Page) settle(a *Ask) {
	row, reset := a.Terms.OfShard(), a.Terms.Eras.lastReset(a.Terms.Era)
	first, rows, _ := p.of(a)
	for i, found := range rows {
		isNew := p.isNew(first + i)
		if isNew || found.TS < reset {
			rows[i] = row.Full(p.Now)
		} else {
			rows[i] = row.Settle(found)
		}
		p.marks[first+i].settled = p.marks[first+i].settled || !isNew && !rows[i].Equal(found)
	}
}
