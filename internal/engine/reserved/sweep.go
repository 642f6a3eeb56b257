package reserved

import (
	"context"
	"errors"
	"math"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/store"
)

const (
	expirePage = 100
	// KeepEnded is how long after its end a reservation is kept.
	KeepEnded = 7 * 24 * time.Hour

	// firstID sorts before every other ID.
	firstID = "00000000-0000-0000-0000-000000000000"
	// expireWait is how long the return of a reservation waits for a bucket that another transaction holds.
	expireWait = time.Second
)

// EachDue passes the due reservations to each, in portions, every one once: in a transaction locked, and some already
// Expired. It ends when none is left or each returns false. bounded bounds the time of one search.
func EachDue(ctx context.Context, u *store.Unit, bounded func(context.Context) (context.Context, context.CancelFunc),
	each func(due []*Reservation) (more bool),
) error {
	last := &Reservation{ID: firstID, ExpiresUs: math.MinInt64}
	for {
		within, cancel := bounded(ctx)
		due, err := In(u).Due(within, u, last.ExpiresUs, last.ID, expirePage)
		cancel()
		if err != nil || len(due) == 0 {
			return err
		}
		last = &Reservation{ID: due[len(due)-1].ID, ExpiresUs: due[len(due)-1].ExpiresUs}
		if !each(due) || len(due) < expirePage {
			return nil
		}
	}
}

// BoundWait bounds how long what follows in the transaction waits for a row.
func BoundWait(ctx context.Context, u *store.Unit) error { return u.BoundWait(ctx, expireWait) }

// ErrStuck is returned for a reservation that a sweep passes over: it would change a bucket that is in Stuck.
var ErrStuck = errors.New("ratelimit: another transaction holds the row of a bucket")

// Stuck is the set of buckets whose rows a sweep over many reservations found held for longer than it waits. A nil
// Stuck is empty, and Add does nothing to it.
type Stuck map[bucket.Key]bool

// Contains reports whether a bucket of the reservation is in the set.
func (s Stuck) Contains(r *Reservation) bool {
	return len(s) > 0 && slices.ContainsFunc(r.Asks(), func(a bucket.Ask) bool { return s[a.Key] })
}

// Add adds the bucket of r whose row was held, if err is a lock timeout. r is nil if no reservation was locked.
func (s Stuck) Add(err error, r *Reservation) {
	if s == nil || r == nil || !store.IsLockTimeout(err) {
		return
	}
	var waited *store.WaitError
	switch asks := r.Asks(); {
	case errors.As(err, &waited):
		s[waited.Row] = true
	case len(asks) == 1:
		s[asks[0].Key] = true
	}
}

type stuckKey struct{}

// Sweeping returns a context for ending many reservations, one call after the other. The calls wait a second at most
// for a row, and return ErrStuck for a bucket that such a wait has ended at before.
func Sweeping(ctx context.Context) context.Context {
	return context.WithValue(ctx, stuckKey{}, Stuck{})
}

// StuckOf returns the set of the sweep that a call is part of, and nil if it is not part of one.
func StuckOf(ctx context.Context) Stuck {
	stuck, _ := ctx.Value(stuckKey{}).(Stuck)
	return stuck
}
