package bucket

// Memory keeps buckets in memory: what the table is to a Limiter, for simulations. A bucket that is not there is full. It is
// for one goroutine.
type Memory struct {
	limits  map[string]*rowsOfLimit
	count   int
	page    Page     // reused by the next call
	answers []Answer // reused by the next call
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

// Take decides on a call at an instant, as Page.Take does. It sets the terms of the asks that hold then. The answers are valid until the
// next call.
func (m *Memory) Take(asks []Ask, now int64) []Answer {
	p := &m.page
	p.Reset(asks)
	p.Now = now
	for i := range p.Rows {
		s, found := m.row(p.Rows[i].Key)
		p.Put(i, s, !found)
	}
	p.SetNow(asks)
	p.Settle(asks)
	m.answers = p.Take(asks, m.answers)
	p.Changes(m.save, func(Key) {})
	return m.answers
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

func (m *Memory) save(k Key, s State) {
	of := m.limits[k.Name]
	if of == nil {
		of = &rowsOfLimit{first: make(map[string]State), others: make(map[Key]State)}
		m.limits[k.Name] = of
	}
	if k.Shard > 0 {
		of.others[k] = s
		return
	}
	before := len(of.first)
	of.first[k.Key] = s
	m.count += len(of.first) - before
}
