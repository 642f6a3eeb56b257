package store

import (
	"context"
	"errors"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

const (
	expirePage = 100
	forgetPage = 1000
	// KeepEnded is how long after its end a reservation is kept.
	KeepEnded = 7 * 24 * time.Hour

	// firstID sorts before every other ID.
	firstID = "00000000-0000-0000-0000-000000000000"
	// expireWait is how long a reservation that is given back waits for a bucket that somebody holds.
	expireWait = time.Second
)

// DueReservations returns pages of the reservations that are to end by themselves.
type DueReservations struct {
	session *Session
	after   int64
	last    string
	done    bool
}

// Due returns the reservations that are to end by themselves.
func (s *Session) Due() *DueReservations {
	return &DueReservations{session: s, after: math.MinInt64, last: firstID}
}

// Next returns the next page of them, and none when there are no more.
func (d *DueReservations) Next(ctx context.Context) (ids []string, err error) {
	if d.done {
		return nil, nil
	}
	due, err := d.session.engine().Due(ctx, &d.session.Unit, d.after, d.last, expirePage)
	if err != nil {
		return nil, err
	}
	for _, r := range due {
		ids, d.after, d.last = append(ids, r.ID), r.ExpiresUs, r.ID
	}
	d.done = len(ids) < expirePage
	return ids, nil
}

// BoundExpireWait bounds how long what follows in the transaction waits for a row.
func (s *Session) BoundExpireWait(ctx context.Context) error { return s.BoundWait(ctx, expireWait) }

// LockDue locks those of the reservations that are to be ended and that nobody else has locked.
func (s *Session) LockDue(ctx context.Context, ids []string) ([]*Reservation, error) {
	return s.engine().LockDue(ctx, &s.Unit, ids)
}

// ForgetEnded deletes some of the reservations that ended long ago, and reports whether there may be more.
func (s *Session) ForgetEnded(ctx context.Context) (more bool, err error) {
	return s.engine().ForgetEnded(ctx, &s.Unit)
}

// Due reads them by reservations_expired.sql.
func (postgres) Due(ctx context.Context, u *Unit, after int64, last string, most int) ([]*Reservation, error) {
	rows, err := u.conn.Query(ctx, u.statements.reservationsExpired, int32(most), u.now(), after, last)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (*Reservation, error) {
		var r Reservation
		return &r, row.Scan(&r.ID, &r.ExpiresUs)
	})
}

// LockDue locks and reads them by reservations_lock.sql.
func (postgres) LockDue(ctx context.Context, u *Unit, ids []string) ([]*Reservation, error) {
	rows, err := u.conn.Query(ctx, u.statements.reservationsLock, ids, u.now())
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (*Reservation, error) {
		var r Reservation
		return &r, row.Scan(append([]any{&r.ID}, r.columns()...)...)
	})
}

// ForgetEnded deletes up to forgetPage.
func (postgres) ForgetEnded(ctx context.Context, u *Unit) (more bool, err error) {
	tag, err := u.conn.Exec(ctx, u.statements.reservationsForget, int32(forgetPage), u.now(), KeepEnded.Microseconds())
	return err == nil && tag.RowsAffected() == forgetPage, err
}

// ErrStuck is returned for a reservation that a sweep passes over: it would change a bucket that is in Stuck.
var ErrStuck = errors.New("ratelimit: another transaction holds the row of a bucket")

// Stuck is the set of buckets whose rows a sweep over many reservations found held for longer than it waits. A nil Stuck is empty,
// and Add does nothing to it.
type Stuck map[bucket.Key]bool

// Contains reports whether a bucket of the reservation is in the set.
func (s Stuck) Contains(r *Reservation) bool {
	return len(s) > 0 && slices.ContainsFunc(r.Asks(), func(a bucket.Ask) bool { return s[a.Key] })
}

// Add adds the bucket of r whose row was held, if err is a lock timeout. r is nil if no reservation was locked.
func (s Stuck) Add(err error, r *Reservation) {
	if s == nil || r == nil || !IsLockTimeout(err) {
		return
	}
	var waited *WaitError
	switch asks := r.Asks(); {
	case errors.As(err, &waited):
		s[waited.Row.Whole()] = true
	case len(asks) == 1:
		s[asks[0].Key] = true
	}
}

type stuckKey struct{}

// Sweeping returns a context for ending many reservations, one call after the other. The calls wait a second at most for a row,
// and return ErrStuck for a bucket that such a wait has ended at before.
func Sweeping(ctx context.Context) context.Context {
	return context.WithValue(ctx, stuckKey{}, Stuck{})
}

// StuckOf returns the set of the sweep that a call is part of, and nil if it is not part of one.
func StuckOf(ctx context.Context) Stuck {
	stuck, _ := ctx.Value(stuckKey{}).(Stuck)
	return stuck
}
