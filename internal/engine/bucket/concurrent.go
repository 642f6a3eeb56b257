package bucket

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// MaxLease bounds how long a lease is, in microseconds.
const MaxLease = int64(24 * time.Hour / time.Microsecond)

// Concurrent is the Kind of a limit on concurrency. Slots are held by leases, and a lease ends by itself Lease
// microseconds after it was taken or renewed. Parts.Leases has the leases of a row. A lease counts while its end is
// after now. Every write drops ended leases.
//
// Each lease has a fencing number, higher than the number of any earlier lease on the same row. It is at least the
// instant at which the lease was taken, so it also grows after the row was pruned. If that number was used before, for
// example because a clock was ahead, the next number is higher by whole fenceCycles. A lease of a rolled back
// transaction is in no row, and its number could otherwise be given to the next lease.
//
// Slots are free again when leases end, so Concurrent does not use the Value of a row, which is Capacity less the slots
// of its leases. The functions in the server use it as long as none of them has ended.
type Concurrent struct {
	Steps
	Lease int64
}

// fenceCycle is in microseconds. Of leases that were taken at different instants at most one in so many has the number
// that another one had before it was rolled back. More would have numbers run ahead of the clock where calls wait for a
// row.
const fenceCycle = int64(1 << 16)

// nextFence returns the fencing number of a lease that is taken at now, after the last.
func nextFence(last, now int64) int64 {
	if now > last {
		return now
	}
	return now + ((last-now)/fenceCycle+1)*fenceCycle
}

// Held is a lease as a row has it.
type Held struct {
	Fence int64
	End   int64 // the instant from which it counts no more
	Slots int64
}

// lastFence returns the highest fencing number that the row has given.
func (s State) lastFence() int64 {
	if s.Parts == nil || len(s.Parts.Leases) == 0 {
		return 0
	}
	return s.Parts.Leases[0]
}

// Leases returns the leases of the row, including leases that have ended since it was written.
func (s State) Leases() (leases []Held) {
	if s.Parts == nil {
		return nil
	}
	for i := 3; i < len(s.Parts.Leases); i += 3 {
		leases = append(leases, Held{s.Parts.Leases[i-2], s.Parts.Leases[i-1], s.Parts.Leases[i]})
	}
	return leases
}

func (s State) leasesAt(now int64) []Held {
	return slices.DeleteFunc(s.Leases(), func(h Held) bool { return h.End <= now })
}

func slotsOf(leases []Held) (slots int64) {
	for _, h := range leases {
		slots += h.Slots
	}
	return slots
}

// holding returns the state, written at now, of a row with these leases and the capacity, after s.
func (s State) holding(leases []Held, capacity float64, last, now int64) State {
	parts := &Parts{Leases: make([]int64, 1, 1+3*len(leases))}
	parts.Leases[0] = last
	for _, h := range leases {
		parts.Leases = append(parts.Leases, h.Fence, h.End, h.Slots)
	}
	return State{Value: capacity - float64(slotsOf(leases)), TS: max(s.TS, now), Capacity: capacity, Parts: parts}
}

// Tokens returns the free slots: below zero while more are held than the capacity has become.
func (Concurrent) Tokens(t Terms, s State, now int64) float64 {
	return t.Capacity - float64(slotsOf(s.leasesAt(now)))
}

// Take adds a lease of cost slots.
func (c Concurrent) Take(t Terms, s State, now int64, cost, lowest float64) (State, bool) {
	fixed := t.FixClock(s, now)
	leases := fixed.leasesAt(now)
	if !(t.Capacity-float64(slotsOf(leases))-cost >= lowest) {
		return s, false
	}
	last, slots := fixed.lastFence(), int64(math.Ceil(cost))
	if slots > 0 {
		last = nextFence(last, now)
		leases = append(leases, Held{last, now + c.Lease, slots})
	}
	return fixed.holding(leases, t.Capacity, last, now), true
}

// Wait returns how long it takes until enough leases have ended. Holders may give their slots back earlier.
func (Concurrent) Wait(t Terms, s State, now int64, cost, lowest float64) time.Duration {
	leases := s.leasesAt(now)
	free := t.Capacity - float64(slotsOf(leases))
	if free-cost >= lowest {
		return 0
	}
	slices.SortFunc(leases, func(a, b Held) int { return cmp.Compare(a.End, b.End) })
	for _, h := range leases {
		if free += float64(h.Slots); free-cost >= lowest {
			return time.Duration(min(h.End-now, Horizon)) * time.Microsecond
		}
	}
	return time.Duration(Horizon) * time.Microsecond
}

// FixClock brings TS back to now, and shortens leases that the wrong clock gave: none of them lasts longer than its own
// length from now on. Leases with an end that a right clock can give stay unchanged.
func (c Concurrent) FixClock(_ Terms, s State, now int64) State {
	ahead, leases := s.TS-now, s.leasesAt(now)
	for i, h := range leases {
		if h.End > now+c.Lease+ClockTolerance.Microseconds() {
			leases[i].End = min(max(h.End-ahead, now+c.Lease), now+MaxLease)
		}
	}
	fixed := s.withLeases(leases, now)
	fixed.TS = now
	return fixed
}

// Charge returns the state unchanged: slots cannot be taken without a lease.
func (Concurrent) Charge(_ Terms, s State, _ int64, _ float64) State { return s }

// Credit gives nothing back: only the holder of a lease gives its slots back.
func (Concurrent) Credit(t Terms, s State, now int64, _, _ float64, _ int64) (State, bool) {
	return t.FixClock(s, now), false
}

// Fill ends all leases.
func (Concurrent) Fill(t Terms, s State, now int64) State {
	s.TS = now
	return s.holding(nil, t.Capacity, s.lastFence(), now)
}

// Enter keeps the leases.
func (Concurrent) Enter(t, _ Terms, s State, from int64, _ Change) State {
	entered := s.holding(s.leasesAt(from), t.Capacity, s.lastFence(), from)
	entered.TS = from
	return entered
}

// CreditUntil returns that nothing is given back.
func (Concurrent) CreditUntil(Terms, int64) int64 { return math.MinInt64 }

// Owes implements Kind.
func (Concurrent) Owes() bool { return false }

// Statement implements Kind.
func (Concurrent) Statement() Statement { return SlotStatement }

// Pruning returns the shortest terms: TS does not show whether leases are held, but buckets_prune.sql checks them.
func (Concurrent) Pruning(t Terms) Terms { return fullAfter(1, t) }

// Holds reports whether the terms are a limit on concurrency.
func Holds(t *Terms) bool {
	_, holds := t.Kind.(Concurrent)
	return holds
}

// AnyHolds reports whether one of the limits is on concurrency: slots may be free before the end of a RetryAfter.
func AnyHolds(asks []Ask) bool { return anyOf(asks, func(a *Ask) bool { return Holds(&a.Terms) }) }

// parts returns the Parts of a row after s under a kind without slots. It keeps the leases, as the statements do:
// another version of a program may hold slots of the limit.
func (s State) parts(taken []float64) *Parts {
	switch {
	case s.Parts != nil && len(s.Parts.Leases) > 0:
		return &Parts{Taken: taken, Leases: s.Parts.Leases}
	case taken != nil:
		return &Parts{Taken: taken}
	default:
		return nil
	}
}

// endLeases returns the state without the leases that it holds. Their numbers are not given again.
func (s State) endLeases() State {
	if s.lastFence() > 0 {
		s.Parts = &Parts{Taken: s.Parts.Taken, Leases: s.Parts.Leases[:1:1]}
	}
	return s
}

// NewLease returns the lease that the ask has taken, if it has: the answer allows the call.
func (a *Ask) NewLease(r *Answer) (taken Held, found bool) {
	leases := r.State.Leases()
	if !a.takesLease() || len(leases) == 0 {
		return Held{}, false
	}
	return leases[len(leases)-1], true
}

func (s State) withFence(fence int64) State {
	leases := slices.Clone(s.Parts.Leases)
	leases[0], leases[len(leases)-3] = fence, fence
	s.Parts = &Parts{Leases: leases}
	return s
}

// AlignFences gives all leases of a call the same fencing token, the highest of them. state returns the row of the i-th
// ask after the call.
func AlignFences(asks []Ask, state func(i int) *State) {
	highest := int64(math.MinInt64)
	for i := range asks {
		if asks[i].takesLease() {
			highest = max(highest, state(i).lastFence())
		}
	}
	for i := range asks {
		if asks[i].takesLease() && state(i).lastFence() != highest {
			*state(i) = state(i).withFence(highest)
		}
	}
}

// takesLease reports whether the ask, when it is allowed, takes a lease.
func (a *Ask) takesLease() bool { return a.Cost > 0 && Holds(&a.Terms) }

// RenewLease extends the lease with that fencing token to end at least length after now, and returns the new state and
// the end. If no such lease is held at now, it returns s and false.
func (s State) RenewLease(now, fence, length int64) (after State, end int64, held bool) {
	leases := s.leasesAt(now)
	for i := range leases {
		if h := &leases[i]; h.Fence == fence {
			h.End = max(h.End, now+length)
			return s.withLeases(leases, now), h.End, true
		}
	}
	return s, 0, false
}

// ReleaseLease returns the state without the lease of that fencing token. If no such lease is held at now, it returns s
// and false.
func (s State) ReleaseLease(now, fence int64) (after State, held bool) {
	leases := s.leasesAt(now)
	left := slices.DeleteFunc(slices.Clone(leases), func(h Held) bool { return h.Fence == fence })
	if len(left) == len(leases) {
		return s, false
	}
	return s.withLeases(left, now), true
}

// withLeases returns the state with other leases. The kind that wrote the row last may be another.
func (s State) withLeases(leases []Held, now int64) State {
	with := s.holding(leases, s.Value+float64(slotsOf(s.Leases())), s.lastFence(), now)
	with.Capacity = s.Capacity
	return with
}
