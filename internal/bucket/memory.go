package bucket

// Memory keeps buckets in memory: what the table is to a Limiter, for simulations. A bucket that is not there is full. It is
// for one goroutine.
type Memory struct {
	limits  map[Key]map[string]State // by names and shards, and then by keys, which need less memory than a Key each
	count   int
	page    Page     // reused by the next call
	answers []Answer // reused by the next call
}

// NewMemory returns a Memory in which every bucket is full.
func NewMemory() *Memory { return &Memory{limits: make(map[Key]map[string]State)} }

// Count returns how many buckets there are.
func (m *Memory) Count() int { return m.count }

// Take decides on a call at an instant, as Page.Take does, or as Page.Look if the call only looks. It sets the terms of the asks that
// hold then. The answers are valid until the next call.
func (m *Memory) Take(asks []Ask, now int64, look bool) []Answer {
	p := &m.page
	p.Reset(asks)
	p.Now = now
	for i := range p.Rows {
		k := p.Rows[i].Key
		s, found := m.limits[Key{Name: k.Name, Shard: k.Shard}][k.Key]
		p.Put(i, s, !found)
	}
	p.SetNow(asks)
	p.Settle(asks)
	if look {
		m.answers = p.Look(asks, m.answers)
		return m.answers
	}
	m.answers = p.Take(asks, m.answers)
	p.Changes(m.save, func(Key) {})
	return m.answers
}

func (m *Memory) save(k Key, s State) {
	of := Key{Name: k.Name, Shard: k.Shard}
	if m.limits[of] == nil {
		m.limits[of] = make(map[string]State)
	}
	before := len(m.limits[of])
	m.limits[of][k.Key] = s
	m.count += len(m.limits[of]) - before
}
