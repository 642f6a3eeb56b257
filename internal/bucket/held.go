package bucket

import "slices"

// ReadsLeases reports whether the leases of the i-th row are read. If not, they stay as they are.
func (p *Page) ReadsLeases(i int) bool {
	r := &p.Rows[i]
	return r.OfLease || Holds(&r.Terms)
}

// PutLease adds a lease to what Put has set, after the earlier leases of the row.
func (p *Page) PutLease(i int, h Held) {
	if !p.marks[i].read {
		return
	}
	if p.found == nil {
		p.found = make([][]Held, len(p.Rows))
	}
	p.found[i] = append(p.found[i], h)
	s, parts := &p.states[i], Parts{}
	if s.Parts != nil {
		parts = *s.Parts
	}
	if len(parts.Leases) == 0 { // the row was deleted, and is another
		parts.Leases = []int64{h.Fence}
	}
	parts.Leases = append(parts.Leases, h.Fence, h.End, h.Slots)
	s.Parts = &parts
}

// LeaseChanges calls save for each lease of the changed rows that is new or has changed, and drop for each that is no more.
func (p *Page) LeaseChanges(save func(k Key, h Held), drop func(k Key, fence int64)) {
	for i := range p.Rows {
		if !p.marks[i].changed || !p.ReadsLeases(i) {
			continue
		}
		var before []Held
		if p.found != nil {
			before = p.found[i]
		}
		after := p.states[i].Leases()
		for _, h := range before {
			if !slices.ContainsFunc(after, func(a Held) bool { return a.Fence == h.Fence }) {
				drop(p.Rows[i].Key, h.Fence)
			}
		}
		for _, h := range after {
			if !slices.Contains(before, h) {
				save(p.Rows[i].Key, h)
			}
		}
	}
}

// Ends returns the first and the last end of the leases in the row, and nil if it has none.
func (s State) Ends() (first, last *int64) {
	for _, h := range s.Leases() {
		if first == nil || h.End < *first {
			first = new(h.End)
		}
		if last == nil || h.End > *last {
			last = new(h.End)
		}
	}
	return first, last
}

// LastFence returns the last fencing number that was given, and nil if none was.
func (s State) LastFence() *int64 {
	if s.Parts == nil || len(s.Parts.Leases) == 0 {
		return nil
	}
	return &s.Parts.Leases[0]
}

// anonymous is the number of what stands for the slots of others in the answer to a call that took a lease: it does not read their
// leases. No lease has that number.
const anonymous = 0

// HideOthers leaves only the new leases in the answers to a call that took some, and a sum of the others, which is all that acquire_1
// knows of them. So the answers don't depend on how the call was decided.
func HideOthers(asks []Ask, answers []Answer) {
	if !AllAllowed(answers) {
		return
	}
	for i := range asks {
		s := &answers[i].State
		if newest, found := asks[i].NewLease(&answers[i]); found {
			leases := s.leasesAt(answers[i].Now)
			_, last := s.Ends()
			*s = s.holdingNewest(newest, slotsOf(leases)-newest.Slots, *last)
		}
	}
}

// holdingNewest returns the state with a lease, and others that hold slots until last.
func (s State) holdingNewest(newest Held, others, last int64) State {
	s.Parts = &Parts{Leases: []int64{newest.Fence}}
	if others > 0 {
		s.Parts.Leases = append(s.Parts.Leases, anonymous, last, others)
	}
	s.Parts.Leases = append(s.Parts.Leases, newest.Fence, newest.End, newest.Slots)
	return s
}

// Acquired returns the state of a row after a call took a lease on it, when all others together hold slots until last at most.
func Acquired(value float64, ts int64, capacity float64, newest Held, last int64) State {
	s := State{Value: value, TS: ts, Capacity: capacity}
	return s.holdingNewest(newest, int64(capacity-value)-newest.Slots, last)
}
