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

// One returns the change of the only lease, and nil if there are several.
func (l *Leases) One() *store.LeaseChange {
	if len(l.Asks) > 1 {
		return nil
	}
	return &l.changes()[0]
}

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
	if !changes[0].Decided {
		return false
	}
	l.NowUs, l.EndUs, l.Lost = changes[0].NowUs, changes[0].End, make([]bool, len(changes))
	for i, c := range changes {
		l.EndUs, l.Lost[i] = min(l.EndUs, c.End), !c.Held
	}
	return true
}

// Change gives back the leases that are not lost, or extends all of them unless one is lost; once.
func (l *Leases) Change(ctx context.Context, s *store.Session) error {
	changes := l.changes()
	if len(changes) == 1 {
		if err := s.ChangeLease(ctx, &changes[0]); err != nil || l.Take(changes...) {
			return err
		}
	}
	err := s.ChangeLeases(ctx, changes)
	l.Take(changes...)
	return err
}
