package slots

import (
	"context"
	"slices"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/store"
)

// Leases are the rows that one call has taken leases on, in the order of locking.
type Leases struct {
	Asks    []bucket.Ask
	Fence   int64
	Lengths []int64 // how long each is from when it is renewed, in microseconds
	Release bool    // whether they are given back, and not renewed

	NowUs int64
	EndUs int64  // when the first of them ends, once renewed
	Lost  []bool // which of them were not held any more
}

// AnyLost reports whether one of the leases was not held any more.
func (l *Leases) AnyLost() bool { return slices.Contains(l.Lost, true) }

// FirstLost returns the limit of the first of those.
func (l *Leases) FirstLost() string { return l.Asks[slices.Index(l.Lost, true)].Key.Name }

// begin sets the instant of the change.
func (l *Leases) begin(now int64) { l.NowUs, l.Lost = now, make([]bool, len(l.Asks)) }

// change returns the i-th row after the change, and notes the result for the lease.
func (l *Leases) change(i int, found bucket.State) (after bucket.State) {
	var end int64
	var held bool
	if l.Release {
		after, held = found.ReleaseLease(l.NowUs, l.Fence)
	} else {
		after, end, held = found.RenewLease(l.NowUs, l.Fence, l.Lengths[i])
	}
	if i == 0 || end < l.EndUs {
		l.EndUs = end
	}
	l.Lost[i] = !held
	return after
}

// One returns the change of the only lease, and nil if there are several.
func (l *Leases) One() *store.LeaseChange {
	if len(l.Asks) > 1 {
		return nil
	}
	return &l.changes()[0]
}

// changes returns the changes of the leases.
func (l *Leases) changes() []store.LeaseChange {
	changes := make([]store.LeaseChange, len(l.Asks))
	for i := range changes {
		changes[i] = store.LeaseChange{Ask: &l.Asks[i], Fence: l.Fence}
		if !l.Release {
			changes[i].Length = l.Lengths[i]
		}
	}
	return changes
}

// Take takes over the results of changes. It returns false if they are not decided.
func (l *Leases) Take(changes ...store.LeaseChange) bool {
	for i, c := range changes {
		switch {
		case !c.Decided:
			return false
		case i == 0:
			l.begin(c.NowUs)
			l.EndUs = c.End
		}
		l.EndUs, l.Lost[i] = min(l.EndUs, c.End), !c.Held
	}
	return true
}

// Change gives back the leases that are not lost, or extends all of them unless one is lost; once.
func (l *Leases) Change(ctx context.Context, s *store.Session) error {
	if c := l.One(); c != nil {
		if err := s.ChangeLease(ctx, c); err != nil || l.Take(*c) {
			return err
		}
	}
	changes := l.changes()
	if decided, err := s.ChangeLeases(ctx, changes); decided || err != nil {
		l.Take(changes...)
		return err
	}
	return s.ChangeRows(ctx, l.Asks, func(p *bucket.Page) {
		l.begin(p.Now)
		after := make([]bucket.State, len(l.Asks))
		for i := range l.Asks {
			a := &l.Asks[i]
			after[i] = l.change(i, a.Terms.FixClock(p.State(a), p.Now))
		}
		for i := range l.Asks {
			if !l.Lost[i] && (l.Release || !l.AnyLost()) {
				p.Set(&l.Asks[i], after[i])
			}
		}
	})
}
