package reserved

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/engine/store"
)

//go:embed sql/*.sql
var files embed.FS

// ErrNotReserved is returned when a reservation does not exist.
var ErrNotReserved = errors.New("ratelimit: no such reservation")

// Records keeps reservations. A store.Engine that is not Postgres implements it.
//
// An error of LockReservation or LockDue fails the transaction, as the error of a statement does.
type Records interface {
	// LockReservation locks and returns a reservation. When there is none, it returns ErrNotReserved and locks nothing;
	// with vacant it locks the ID, and returns a reservation without buckets, which the caller saves with some.
	LockReservation(ctx context.Context, u *store.Unit, id string, vacant bool) (*Reservation, error)
	// SaveReservation writes the fields that can change of a locked reservation.
	SaveReservation(ctx context.Context, u *store.Unit, r *Reservation) error
	// Due returns up to most reservations that are open and have ended, and that come after the one named, by their ends.
	Due(ctx context.Context, u *store.Unit, after int64, last string, most int) ([]*Reservation, error)
	// LockDue locks the open reservations that have ended and that no other transaction has locked. It returns them in the
	// order of their ends.
	LockDue(ctx context.Context, u *store.Unit, ids []string) ([]*Reservation, error)
	// ForgetEnded deletes some of the reservations that are not open and ended before KeepEnded, and reports whether there
	// may be more.
	ForgetEnded(ctx context.Context, u *store.Unit) (more bool, err error)
}

// In returns the records of the engine that keeps the rows of a unit.
func In(u *store.Unit) Records {
	if own, ok := u.Engine().(Records); ok {
		return own
	}
	return Tables{}
}

// Tables are the Records in Postgres.
type Tables struct{}

// Queue queues the statement that inserts the reservation, or saves it.
func (r *Reservation) Queue(u *store.Unit, batch *pgx.Batch) {
	batch.Queue(u.Statement(files, "reservation_save"), r.parameters()...)
}

// LockReservation locks the reservation, and reads it with the time behind the lock. The statement inserts one without
// buckets when there is none, which is undone unless the caller wants it. Outside a transaction it only reads: see
// store.ErrChanged.
func (Tables) LockReservation(ctx context.Context, u *store.Unit, id string, vacant bool) (*Reservation, error) {
	if u.IsOnPool() {
		read, err := readAll(ctx, u, "reservation_read", id)
		switch {
		case err != nil:
			return nil, err
		case len(read) == 0 && vacant:
			return nil, store.ErrNeedsTx
		case len(read) == 0:
			return nil, ErrNotReserved
		}
		return read[0], nil
	}
	batch := &pgx.Batch{}
	store.QueueSavepoint(batch)
	batch.Queue(u.Statement(files, "reservation_lock"), id)
	r := &Reservation{ID: id}
	now, err := u.Ask(ctx, batch, func(results pgx.BatchResults) error {
		if _, err := results.Exec(); err != nil {
			return err
		}
		return r.scan(results.QueryRow())
	})
	r.NowUs = now
	if err == nil && len(r.Buckets) == 0 && !vacant {
		if err = u.BackToSavepoint(ctx); err == nil {
			err = ErrNotReserved
		}
	}
	if err != nil {
		return nil, err
	}
	return r, nil
}

// SaveReservation writes the reservation.
func (Tables) SaveReservation(ctx context.Context, u *store.Unit, r *Reservation) error {
	batch := &pgx.Batch{}
	r.Queue(u, batch)
	return u.Conn().SendBatch(ctx, batch).Close()
}

// Due reads them by reservations_expired.sql.
func (Tables) Due(ctx context.Context, u *store.Unit, after int64, last string,
	most int,
) (due []*Reservation, err error) {
	batch, filtered := &pgx.Batch{}, false
	u.QueueFiltered(batch)
	batch.Queue(u.Statement(files, "reservations_expired"), int32(most), u.AsOf(), after, last)
	err = u.Send(ctx, batch, func(results pgx.BatchResults) error {
		if filtered, err = store.ReceiveFiltered(results); err != nil {
			return err
		}
		rows, err := results.Query()
		if err != nil {
			return err
		}
		due, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (*Reservation, error) {
			var r Reservation
			return &r, row.Scan(&r.ID, &r.ExpiresUs)
		})
		return err
	})
	if err == nil && filtered {
		err = u.CheckHidden(ctx)
	}
	return due, err
}

// LockDue locks and reads each of them by a statement, in one message. Outside a transaction it only reads them.
func (Tables) LockDue(ctx context.Context, u *store.Unit, ids []string) (locked []*Reservation, err error) {
	statement := "reservation_free"
	if u.IsOnPool() {
		statement = "reservation_read"
	}
	locked, err = readAll(ctx, u, statement, ids...)
	locked = slices.DeleteFunc(locked, func(r *Reservation) bool { return !r.IsDue(r.NowUs) })
	slices.SortFunc(locked, ByEnd)
	return locked, err
}

// readAll reads those of the reservations that there are, each by a statement, in one message, and then the time.
func readAll(ctx context.Context, u *store.Unit, statement string, ids ...string) (read []*Reservation, err error) {
	batch := &pgx.Batch{}
	for _, id := range ids {
		batch.Queue(u.Statement(files, statement), id)
	}
	now, err := u.Ask(ctx, batch, func(results pgx.BatchResults) error {
		for _, id := range ids {
			r := &Reservation{ID: id}
			switch err := r.scan(results.QueryRow()); {
			case err == nil:
				read = append(read, r)
			case !errors.Is(err, pgx.ErrNoRows):
				return err
			}
		}
		return nil
	})
	for _, r := range read {
		r.NowUs = now
	}
	return read, err
}

// IsDue reports whether the reservation is to end by itself.
func (r *Reservation) IsDue(now int64) bool { return r.State == Open && r.ExpiresUs < now }

// ByEnd orders reservations by their ends.
func ByEnd(a, b *Reservation) int {
	return cmp.Or(cmp.Compare(a.ExpiresUs, b.ExpiresUs), strings.Compare(a.ID, b.ID))
}

// ForgetPage is how many reservations ForgetEnded deletes.
const ForgetPage = 1000

// ForgetEnded deletes up to ForgetPage.
func (Tables) ForgetEnded(ctx context.Context, u *store.Unit) (more bool, err error) {
	statement := "reservations_forget"
	if u.IsRouted() {
		statement = "reservations_forget_routed"
	}
	tag, err := u.Conn().Exec(ctx, u.Statement(files, statement), int32(ForgetPage), u.AsOf(), KeepEnded.Microseconds())
	return err == nil && tag.RowsAffected() == ForgetPage, err
}
