package bucket

import "slices"

// Memory keeps buckets in memory: what the table is to a Limiter, for simulations. A bucket that is not there is full. It is
// for one goroutine.
type Memory struct {
	limits  map[string]*rowsOfLimit
	count   int
	answers []Answer // the room for those to the next call
}

// rowsOfLimit are the rows of a limit's buckets. Most buckets have one.
type rowsOfLimit struct {
	first  map[string]State
	others map[Key]State
}

// NewMemory returns a Memory in which every bucket is full.
func NewMemory() *Memory { return &Memory{limits: make(map[string]*rowsOfLimit)} }

// Count returns how many buckets there are.
func (m *Memory) Count() int { return m.count }

// Take decides on a call at an instant, all or nothing. The terms of the asks become those that hold then. Of a bucket with
// several rows it takes from all of them together. A refusal changes nothing but the rows that a wrong clock has left in
// the future, which it brings back. The answers are good until the next call.
func (m *Memory) Take(asks []Ask, now int64) []Answer {
	answers := slices.Grow(m.answers[:0], len(asks))[:len(asks)]
	clear(answers)
	m.answers = answers
	now = m.advance(asks, now)
	if AnyLender(asks) {
		m.takeLent(asks, answers, now)
		return answers
	}
	all := true
	for i := range asks {
		a, r := &asks[i], &answers[i]
		a.SetNow(now)
		r.Now = now
		if a.RowCount() == 1 {
			s := m.settledRow(a, now)
			r.State, r.Allowed = a.Terms.Take(s, now, a.Cost, a.Lowest)
		} else {
			rows := m.settledRows(a, now)
			r.Allowed = a.Terms.TakeRows(rows, now, a.Cost, a.Lowest)
			r.SetRows(a, rows)
		}
		all = all && r.Allowed
	}
	switch {
	case !all:
		m.undo(asks, answers, now)
	case AllCostless(asks): // which only looks: what is told is counted from when the row was written
		for i := range asks {
			if a := &asks[i]; a.RowCount() == 1 {
				answers[i].State = m.settledRow(a, now)
			}
		}
	default:
		AlignFences(asks, func(i int) *State { return &answers[i].State })
		for i := range asks {
			m.save(&asks[i], &answers[i])
		}
	}
	return answers
}

// takeLent is Take for asks of which some have lenders.
func (m *Memory) takeLent(asks []Ask, answers []Answer, now int64) {
	rows := make([][]State, len(asks))
	for i := range asks {
		a := &asks[i]
		a.SetNow(now)
		if a.RowCount() == 1 {
			rows[i] = []State{m.settledRow(a, now)}
		} else {
			rows[i] = m.settledRows(a, now)
		}
	}
	copy(answers, Decide(asks, now, func(i int) []State { return rows[i] }))
	if !AllAllowed(answers) {
		m.undo(asks, answers, now)
		return
	}
	for i := range asks {
		Spend(asks, answers, i, rows[i], now)
		a, r := &asks[i], &answers[i]
		r.SetRows(a, rows[i])
		fix := r.Borrowed && a.FromFuture(*r)
		if fix {
			m.fix(a, r)
		}
		if fix || !r.Borrowed && !AllCostless(asks) {
			m.save(a, r)
		}
	}
}

// undo sets what the answers to a call that was refused say of the buckets: that nothing was taken.
func (m *Memory) undo(asks []Ask, answers []Answer, now int64) {
	for i := range asks {
		a, r := &asks[i], &answers[i]
		if a.RowCount() == 1 {
			r.State = m.settledRow(a, now)
		} else {
			r.SetRows(a, m.settledRows(a, now))
		}
		if a.FromFuture(*r) {
			m.fix(a, r)
			m.save(a, r)
		}
	}
}

// fix brings the rows of the answer back to its instant.
func (m *Memory) fix(a *Ask, r *Answer) {
	if r.Rows == nil {
		r.State = a.Terms.FixClock(r.State, r.Now)
		return
	}
	r.SetRows(a, a.Terms.FixClocks(r.Rows, r.Now))
}

// advance returns the instant of the decision: that from which the latest era holds that a row has seen, where it is only a
// moment later.
func (m *Memory) advance(asks []Ask, now int64) int64 {
	for i := range asks {
		t := asks[i].Terms
		if t.Eras == nil {
			continue
		}
		s, found := m.row(asks[i].Key)
		if !found || s.TS <= now || t.FromFuture(s, now) {
			continue
		}
		if since := t.At(s.TS).since(); since-now <= ClockTolerance.Microseconds() {
			now = max(now, since)
		}
	}
	return now
}

// settledRow returns what the one row of a bucket holds, settled by the terms of the ask.
func (m *Memory) settledRow(a *Ask, now int64) State {
	s, found := m.row(a.Key)
	if !found {
		return a.Terms.Full(now)
	}
	return a.Terms.Settle(s)
}

// settledRows is settledRow for a bucket that has, or had, several.
func (m *Memory) settledRows(a *Ask, now int64) []State {
	n := a.RowCount()
	rows, absent := make([]State, n), make([]bool, n)
	k, full := a.FirstRow(), a.Terms.OfShard().Full(now)
	for i := range rows {
		k.Shard = int32(i)
		s, found := m.row(k)
		if rows[i], absent[i] = s, !found; !found {
			rows[i] = full
		}
	}
	return a.Terms.SettleRows(rows, absent, now)
}

func (m *Memory) row(k Key) (s State, found bool) {
	of := m.limits[k.Name]
	switch {
	case of == nil:
	case k.Shard == 0:
		s, found = of.first[k.Key]
	default:
		s, found = of.others[k]
	}
	return s, found
}

// save keeps what the bucket holds after the answer.
func (m *Memory) save(a *Ask, r *Answer) {
	k := a.FirstRow()
	of := m.limits[k.Name]
	if of == nil {
		of = &rowsOfLimit{first: make(map[string]State), others: make(map[Key]State)}
		m.limits[k.Name] = of
	}
	before, first := len(of.first), r.State
	if r.Rows != nil {
		first = r.Rows[0]
	}
	of.first[k.Key] = first
	m.count += len(of.first) - before
	for i := 1; i < len(r.Rows); i++ {
		k.Shard = int32(i)
		of.others[k] = r.Rows[i]
	}
}
