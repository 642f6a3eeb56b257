package buckettest

import (
	"slices"
	"time"
)

// ExactSlots is the documented behaviour of one bucket's slots a second time. Instants are microseconds.
type ExactSlots struct {
	leases []exactLease
	last   int64 // the highest fencing number
	ts     int64
	stored bool
}

type exactLease struct{ fence, end, slots int64 }

// SlotPolicy is a policy of slots: how many there are, and how long a lease is.
type SlotPolicy struct{ Most, Length int64 }

// Held returns how many slots are held at an instant.
func (e *ExactSlots) Held(now int64) (slots int64) {
	for _, l := range e.leases {
		if now < l.end {
			slots += l.slots
		}
	}
	return slots
}

// isFromFuture reports whether the row was written by a clock that was wrong.
func (e *ExactSlots) isFromFuture(now int64) bool { return e.stored && e.ts-now > Minute }

// mended returns the bucket at now, with no lease of a wrong clock that holds for longer than it was given for.
func (e *ExactSlots) mended(now int64, p SlotPolicy) ExactSlots {
	m := *e
	m.leases = nil
	wrong := e.isFromFuture(now)
	for _, l := range e.leases {
		if l.end <= now {
			continue
		}
		if wrong && l.end-now-p.Length > Minute {
			l.end = min(now+Day, max(now+p.Length, l.end-(e.ts-now)))
		}
		m.leases = append(m.leases, l)
	}
	if wrong {
		m.ts = now
	}
	return m
}

// write takes over the changes of a call.
func (e *ExactSlots) write(m ExactSlots, now int64) {
	*e = m
	if !e.stored || now > e.ts {
		e.ts = now
	}
	e.stored = true
}

// Acquire takes slots. refused is the wait until they are free, or 0.
func (e *ExactSlots) Acquire(now int64, p SlotPolicy, slots int64) (fence, end int64, refused time.Duration) {
	m := e.mended(now, p)
	if m.Held(now)+slots > p.Most {
		if e.isFromFuture(now) {
			e.write(m, now)
		}
		return 0, 0, m.wait(now, p, slots)
	}
	m.last = exactFence(m.last, now)
	m.leases = append(m.leases, exactLease{m.last, now + p.Length, slots})
	e.write(m, now)
	return m.last, now + p.Length, 0
}

// exactFence returns now, or the first number above last that differs from now by a multiple of 65,536 microseconds.
func exactFence(last, now int64) int64 {
	if now > last {
		return now
	}
	const cycle = 65536
	return last + cycle - (last-now)%cycle
}

// wait returns the time until that many slots are free.
func (e *ExactSlots) wait(now int64, p SlotPolicy, slots int64) time.Duration {
	least := int64(-1)
	for _, l := range e.leases {
		if e.Held(l.end)+slots <= p.Most && (least < 0 || l.end < least) {
			least = l.end
		}
	}
	return time.Duration(least-now) * time.Microsecond
}

// Renew extends a lease, unless it is lost.
func (e *ExactSlots) Renew(now int64, p SlotPolicy, fence int64) (end int64, held bool) {
	m := e.mended(now, p)
	for i := range m.leases {
		if l := &m.leases[i]; l.fence == fence {
			l.end = max(l.end, now+p.Length)
			e.write(m, now)
			return l.end, true
		}
	}
	return 0, false
}

// Release gives a lease back, unless it is lost.
func (e *ExactSlots) Release(now int64, p SlotPolicy, fence int64) (held bool) {
	m := e.mended(now, p)
	n := len(m.leases)
	m.leases = slices.DeleteFunc(m.leases, func(l exactLease) bool { return l.fence == fence })
	if len(m.leases) == n {
		return false
	}
	e.write(m, now)
	return true
}

// Fill ends all leases.
func (e *ExactSlots) Fill(now int64, p SlotPolicy) {
	m := e.mended(now, p)
	m.leases = nil
	e.write(m, now)
	e.ts = now
}
