package bucket

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

// anonymous is the number of what stands for the slots of others in the answer to a call that took a lease: it does not
// read their leases. No lease has that number.
const anonymous = 0

// HideOthers leaves only the new leases in the answers to a call that took some, and a sum of the others, which is all
// that acquire_1 knows of them. So the answers don't depend on how the call was decided.
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

// Acquired returns the state of a row after a call took a lease on it, when all others together hold slots until last
// at most.
func Acquired(value float64, ts int64, capacity float64, newest Held, last int64) State {
	s := State{Value: value, TS: ts, Capacity: capacity}
	return s.holdingNewest(newest, int64(capacity-value)-newest.Slots, last)
}
