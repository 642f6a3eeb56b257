package store

import (
	"context"
	"math"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	expirePage = 100
	forgetPage = 1000
	keepEnded  = 7 * 24 * time.Hour

	// firstID sorts before every other ID.
	firstID = "00000000-0000-0000-0000-000000000000"
	// expireWait is how long a reservation that is given back waits for a bucket that somebody holds, as lock_timeout has it.
	expireWait = "1s"
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
	s := d.session
	if s.engine != nil {
		return d.dueOnEngine()
	}
	if err := s.LearnLayout(ctx); err != nil {
		return nil, err
	}
	rows, err := s.conn.Query(ctx, s.statements.reservationsExpired, int32(expirePage), s.now(), d.after, d.last)
	if err != nil {
		return nil, err
	}
	_, err = pgx.ForEachRow(rows, []any{&d.last, &d.after}, func() error {
		ids = append(ids, d.last)
		return nil
	})
	d.done = len(ids) < expirePage
	return ids, err
}

// BoundExpireWait bounds how long what follows in the transaction waits for a row.
func (s *Session) BoundExpireWait(ctx context.Context) error {
	if s.engine != nil {
		s.engine.BoundWait(time.Second)
		return nil
	}
	if s.routed() {
		batch := &pgx.Batch{}
		boundWaitRouted(batch, expireWait)
		return s.conn.SendBatch(ctx, batch).Close()
	}
	_, err := s.conn.Exec(ctx, s.statements.boundWait, expireWait)
	return err
}

// LockDue locks those of the reservations that are to be ended and that nobody else has locked.
func (s *Session) LockDue(ctx context.Context, ids []string) ([]*Reservation, error) {
	if s.engine != nil {
		now := s.instant()
		locked, err := s.engine.LockDue(ids, now)
		for _, r := range locked {
			r.NowUs = now
		}
		return locked, err
	}
	if s.routed() {
		return s.lockDueRouted(ctx, ids)
	}
	rows, err := s.conn.Query(ctx, s.statements.reservationsLock, ids, s.now())
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (*Reservation, error) {
		var r Reservation
		return &r, row.Scan(append([]any{&r.ID}, r.columns()...)...)
	})
}

// ForgetEnded deletes some of the reservations that ended long ago, and reports whether there may be more.
func (s *Session) ForgetEnded(ctx context.Context) (more bool, err error) {
	if s.engine != nil {
		s.engine.ForgetEnded(s.instant() - keepEnded.Microseconds())
		return false, nil
	}
	if s.routed() {
		return s.forgetRouted(ctx)
	}
	tag, err := s.conn.Exec(ctx, s.statements.reservationsForget, int32(forgetPage), s.now(), int64(keepEnded/time.Microsecond))
	return err == nil && tag.RowsAffected() == forgetPage, err
}
