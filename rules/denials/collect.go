package denials

// collect returns what is to be written of a minute: what was counted since the last time, and what could not be written.
// Sums over it are exact at any time. A key that is told apart for the first time takes with it what was collected of it
// under the empty key, so that this may go down. With done, all keys are told apart, and from then on no more.
func (m *minute) collect(done bool) map[id]tally {
	m.mu.Lock()
	rows := m.unsent
	m.unsent = nil
	m.mu.Unlock()
	if rows == nil {
		rows = make(map[id]tally)
	}
	for i := range m.stripes {
		m.stripes[i].collect(rows, done)
	}
	return rows
}

func (s *stripe) collect(rows map[id]tally, done bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for of, t := range s.rest {
		add(rows, id{pair: of}, *t)
	}
	clear(s.rest)
	early := min(s.early, earlyOnce)
	for _, r := range s.keys.order {
		p := r.place
		switch {
		case p.isTold:
		case done:
			p.tell(rows)
		case early > 0 && r.count-r.over > r.over: // most of the count is its own
			p.tell(rows)
			s.early, early = s.early-1, early-1
		}
		if p.unsent.refused == 0 {
			continue
		}
		of := p.id
		if !p.isTold {
			of.key = ""
			p.lent.add(p.unsent)
		}
		add(rows, of, p.unsent)
		p.unsent = tally{}
	}
	if done {
		s.hasKeys, s.keys = false, heaviest{}
	}
}

// tell tells the key apart from here on, and moves what was collected of it under the empty key.
func (p *place) tell(rows map[id]tally) {
	p.isTold = true
	if p.lent.refused == 0 {
		return
	}
	add(rows, p.id, p.lent)
	add(rows, id{pair: p.id.pair}, tally{-p.lent.refused, -p.lent.cost, p.lent.lastUs})
	p.lent = tally{}
}

func add(rows map[id]tally, of id, t tally) {
	sum := rows[of]
	sum.add(t)
	rows[of] = sum
}

// putBack keeps rows that could not be written, and reports whether the minute still counts.
func (m *minute) putBack(rows map[id]tally) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.isGone {
		m.unsent = rows
	}
	return !m.isGone
}

// forget has the keys keep nothing of what was collected under the empty key, because that may not have been written:
// what is moved from there later has to be there.
func (m *minute) forget() {
	for i := range m.stripes {
		s := &m.stripes[i]
		s.mu.Lock()
		for _, r := range s.keys.order {
			r.lent = tally{}
		}
		s.mu.Unlock()
	}
}

// end counts the minute no more, and returns how many refusals of it were not written.
func (m *minute) end() int64 {
	m.mu.Lock()
	m.isGone = true
	lost := refusedIn(m.unsent)
	m.unsent = nil
	m.mu.Unlock()
	for i := range m.stripes {
		s := &m.stripes[i]
		s.mu.Lock()
		for _, t := range s.rest {
			lost += t.refused
		}
		for _, r := range s.keys.order {
			lost += r.unsent.refused
		}
		s.isGone, s.rest, s.keys = true, nil, heaviest{}
		s.mu.Unlock()
	}
	return lost
}

// refusedIn returns how many refusals the rows stand for.
func refusedIn(rows map[id]tally) (refused int64) {
	for _, t := range rows {
		refused += t.refused
	}
	return refused
}
