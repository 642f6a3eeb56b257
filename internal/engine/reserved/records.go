package reserved

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"strings"
	"time"

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
	// Due returns up to most reservations that are open and have ended, and that come after the one named, by their
	// ends. In a transaction it locks them, and leaves out what another one has locked. It may end those that return
	// nothing.
	Due(ctx context.Context, u *store.Unit, after int64, last string, most int) ([]*Reservation, error)
	// LockDue locks a reservation that is open and has ended. It returns nil if another transaction has locked it.
	LockDue(ctx context.Context, u *store.Unit, id string) (*Reservation, error)
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
		r, err := read(ctx, u, "reservation_read", id)
		switch {
		case err == nil && r == nil && vacant:
			return nil, store.ErrNeedsTx
		case err == nil && r == nil:
			return nil, ErrNotReserved
		}
		return r, err
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

// Due has expire_1 find them.
func (Tables) Due(ctx context.Context, u *store.Unit, after int64, last string,
	most int,
) (due []*Reservation, err error) {
	batch, filtered := &pgx.Batch{}, false
	u.QueueFiltered(batch)
	batch.Queue(u.Function("expire_1", 5, "id::text, "+columnsOf("")), int32(most), after, last, !u.IsRouted(), u.AsOf())
	now, err := u.Ask(ctx, batch, func(results pgx.BatchResults) error {
		if filtered, err = store.ReceiveFiltered(results); err != nil {
			return err
		}
		rows, err := results.Query()
		if err != nil {
			return err
		}
		due, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (*Reservation, error) {
			var r Reservation
			return &r, r.scan(row, &r.ID)
		})
		return err
	})
	for _, r := range due {
		r.NowUs = now
	}
	if err == nil && filtered {
		err = u.CheckHidden(ctx)
	}
	return due, err
}

// start has start_1 start the work of a reservation. done is false if it left that to the caller.
func (l *Life) start(ctx context.Context, id string, paused *int64, again bool) (t Turn, done bool, err error) {
	u := &l.Session.Unit
	err = l.Session.Once(ctx, func(ctx context.Context, conn store.Conn) error {
		rows, err := conn.Query(ctx, u.Function("start_1", 6, "done, wait_us, restarted, now_us, "+columnsOf("(r).")),
			id, paused, again, l.ExpireAfter.Microseconds(), u.AsOf(), u.IsOnPool())
		if err != nil {
			return err
		}
		var wait int64
		t.Reservation = &Reservation{ID: id}
		_, err = pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (struct{}, error) {
			return struct{}{}, t.scan(row, &done, &wait, &t.Restarted, &t.NowUs)
		})
		t.Wait = time.Duration(wait) * time.Microsecond
		if errors.Is(err, pgx.ErrNoRows) { // which is an answer
			t.Reservation, err = nil, nil
		}
		return err
	})
	if err == nil && t.Reservation == nil {
		err = ErrNotReserved
	}
	return t, done, err
}

// LockDue locks and reads it by a statement. Outside a transaction it only reads it.
func (Tables) LockDue(ctx context.Context, u *store.Unit, id string) (*Reservation, error) {
	statement := "reservation_free"
	if u.IsOnPool() {
		statement = "reservation_read"
	}
	r, err := read(ctx, u, statement, id)
	if err != nil || r == nil || !r.IsDue(r.NowUs) {
		return nil, err
	}
	return r, nil
}

// read reads a reservation by a statement, and then the time. It returns nil if there is none.
func read(ctx context.Context, u *store.Unit, statement, id string) (*Reservation, error) {
	batch, r := &pgx.Batch{}, &Reservation{ID: id}
	batch.Queue(u.Statement(files, statement), id)
	found := true
	now, err := u.Ask(ctx, batch, func(results pgx.BatchResults) error {
		err := r.scan(results.QueryRow())
		if found = !errors.Is(err, pgx.ErrNoRows); !found {
			return nil
		}
		return err
	})
	if r.NowUs = now; err != nil || !found {
		return nil, err
	}
	return r, nil
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
