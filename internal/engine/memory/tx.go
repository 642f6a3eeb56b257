package memory

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/reserved"
	"github.com/pgratelimit/pgratelimit/internal/engine/store"
)

// Tx is a transaction as store.Ledgers, for one goroutine at a time. It also serves calls outside a transaction that
// lock and write nothing.
type Tx struct {
	*DB

	writes   writes
	saved    mark
	held     []any // the rows that are locked, in that order
	waiting  *lock // nil: it waits for none
	mostWait time.Duration
	failed   bool // whether it can only be rolled back
	alone    bool // whether it is for calls outside a transaction
	ended    bool
}

// writes are what a transaction has written and not committed.
type writes struct {
	buckets      map[bucket.Key]bucket.State
	reservations map[string]*reserved.Reservation // nil: deleted
}

// mark is a place in a transaction to go back to.
type mark struct {
	writes writes
	held   int
}

// Begin begins a transaction.
func (db *DB) Begin() *Tx { return &Tx{DB: db} }

// enter begins a statement: it locks the database, and checks that the transaction has not ended or failed.
func (tx *Tx) enter() error {
	tx.mu.Lock()
	switch {
	case tx.ended:
		return pgx.ErrTxClosed
	case tx.failed:
		return failure(codeInFailedTx, "current transaction is aborted, commands ignored until end of transaction block")
	}
	return nil
}

func (tx *Tx) leave() { tx.mu.Unlock() }

// lock locks a row, and fails the transaction if it cannot.
func (tx *Tx) lock(ctx context.Context, row any) error {
	err := tx.acquire(ctx, row)
	tx.failed = tx.failed || err != nil
	return err
}

func (tx *Tx) bucket(k bucket.Key) (s bucket.State, found bool) {
	if own, wrote := tx.writes.buckets[k]; wrote {
		return own, true
	}
	s, found = tx.buckets[k]
	return s, found
}

// reservation returns the row of a reservation for the transaction, and nil when there is none.
func (tx *Tx) reservation(id string) *reserved.Reservation {
	if own, wrote := tx.writes.reservations[id]; wrote {
		return own
	}
	return tx.reservations[id]
}

// Read returns what the rows hold.
func (tx *Tx) Read(_ context.Context, u *store.Unit, rows []bucket.Ask) ([]bucket.Answer, error) {
	now := u.Instant()
	err := tx.enter()
	defer tx.leave()
	if err != nil {
		return nil, err
	}
	answers := make([]bucket.Answer, len(rows))
	for i := range rows {
		state, found := tx.bucket(rows[i].Key)
		if !found {
			state = rows[i].Terms.Full(now)
		}
		answers[i] = bucket.Answer{State: state, Now: now, Absent: !found}
	}
	return answers, nil
}

// Lock locks the rows and puts their states. The instant is taken before it waits, as in a statement.
func (tx *Tx) Lock(ctx context.Context, u *store.Unit, p *bucket.Ledger, mark bool) error {
	p.Now = u.Instant()
	err := tx.enter()
	defer tx.leave()
	if err != nil {
		return err
	}
	if mark {
		tx.saved = tx.mark()
	}
	for i := range p.Rows {
		if err := tx.lock(ctx, p.Rows[i].Key); err != nil {
			return err
		}
	}
	for i := range p.Rows {
		state, found := tx.bucket(p.Rows[i].Key)
		p.Put(i, state, !found)
	}
	return nil
}

// ChangeFree puts the rows of a ledger, has change change it, and saves that, unless a transaction holds a row.
func (tx *Tx) ChangeFree(u *store.Unit, p *bucket.Ledger, change func()) (done bool) {
	p.Now = u.Instant()
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if len(tx.locks) > 0 && slices.ContainsFunc(p.Rows, func(a bucket.Ask) bool { return tx.locks[a.Key] != nil }) {
		return false
	}
	for i := range p.Rows {
		state, found := tx.buckets[p.Rows[i].Key]
		p.Put(i, state, !found)
	}
	change()
	p.Changes(func(k bucket.Key, state bucket.State) { tx.buckets[k] = state })
	return true
}

// Save writes rows and reservations.
func (tx *Tx) Save(_ context.Context, _ *store.Unit, p *bucket.Ledger, made ...store.Record) error {
	err := tx.enter()
	defer tx.leave()
	if err != nil {
		return err
	}
	if tx.writes.buckets == nil {
		tx.writes.buckets = make(map[bucket.Key]bucket.State)
	}
	p.Changes(func(k bucket.Key, state bucket.State) { tx.writes.buckets[k] = state })
	for _, record := range made {
		if r, ok := record.(*reserved.Reservation); ok {
			tx.writeReservation(r)
		}
	}
	return nil
}

// QueueBound bounds each wait for a row.
func (tx *Tx) QueueBound(_ *pgx.Batch, _ *store.Unit, most time.Duration) { tx.mostWait = most }

// mark returns the position of the transaction, for a savepoint. db.mu is held.
func (tx *Tx) mark() mark {
	return mark{writes{maps.Clone(tx.writes.buckets), maps.Clone(tx.writes.reservations)}, len(tx.held)}
}

// back goes back to a place. db.mu is held.
func (tx *Tx) back(to mark) {
	tx.writes = writes{maps.Clone(to.writes.buckets), maps.Clone(to.writes.reservations)}
	tx.failed = false
	tx.release(to.held)
}

// Undo goes back to the last mark.
func (tx *Tx) Undo(context.Context, *store.Unit) error { return tx.backTo(tx.saved) }

// backTo goes back to a place.
func (tx *Tx) backTo(before mark) error {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if tx.ended {
		return pgx.ErrTxClosed
	}
	tx.back(before)
	return nil
}

// Spoil makes sure that the transaction can only be rolled back.
func (tx *Tx) Spoil(context.Context, *store.Unit) {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	tx.failed = true
}

// SaveReservation writes a reservation.
func (tx *Tx) SaveReservation(_ context.Context, _ *store.Unit, r *reserved.Reservation) error {
	err := tx.enter()
	defer tx.leave()
	if err == nil {
		tx.writeReservation(r)
	}
	return err
}

// writeReservation writes a reservation. db.mu is held.
func (tx *Tx) writeReservation(r *reserved.Reservation) { tx.setReservation(r.ID, copyOf(r)) }

// setReservation sets the row of a reservation; nil deletes it. db.mu is held.
func (tx *Tx) setReservation(id string, r *reserved.Reservation) {
	if tx.writes.reservations == nil {
		tx.writes.reservations = make(map[string]*reserved.Reservation)
	}
	tx.writes.reservations[id] = r
}

// LockReservation locks and returns a reservation.
func (tx *Tx) LockReservation(ctx context.Context, u *store.Unit, id string,
	vacant bool,
) (*reserved.Reservation, error) {
	now := u.Instant()
	err := tx.enter()
	defer tx.leave()
	if err != nil {
		return nil, err
	}
	tx.saved = tx.mark()
	if err := tx.lock(ctx, id); err != nil {
		return nil, err
	}
	r := tx.reservation(id)
	switch {
	case r != nil:
		r = copyOf(r)
	case vacant:
		r = &reserved.Reservation{ID: id}
	default:
		tx.back(tx.saved)
		return nil, reserved.ErrNotReserved
	}
	r.NowUs = now
	return r, nil
}

// Due returns reservations that are to end, as far as the transaction sees them. It ends none.
func (tx *Tx) Due(_ context.Context, u *store.Unit, after int64, last string,
	most int,
) (due []*reserved.Reservation, err error) {
	now := u.Instant()
	err = tx.enter()
	defer tx.leave()
	if err != nil {
		return nil, err
	}
	all := maps.Clone(tx.reservations)
	maps.Copy(all, tx.writes.reservations)
	for id, r := range all {
		if r != nil && r.IsDue(now) && (r.ExpiresUs > after || r.ExpiresUs == after && r.ID > last) &&
			(tx.alone || tx.isFree(id)) {
			r = copyOf(r)
			r.NowUs = now
			due = append(due, r)
		}
	}
	slices.SortFunc(due, reserved.ByEnd)
	due = due[:min(len(due), most)]
	for i := range due {
		tx.lockFree(due[i].ID)
	}
	return due, nil
}

// isFree reports whether no other transaction has locked a reservation. db.mu is held.
func (tx *Tx) isFree(id string) bool {
	l := tx.locks[id]
	return l == nil || l.holder == tx
}

// lockFree locks a reservation that is free, in a transaction. db.mu is held.
func (tx *Tx) lockFree(id string) {
	if !tx.alone && tx.locks[id] == nil {
		tx.locks[id] = &lock{holder: tx}
		tx.held = append(tx.held, id)
	}
}

// LockDue locks and returns a reservation, if it is due and no other transaction has locked it.
func (tx *Tx) LockDue(_ context.Context, u *store.Unit, id string) (due *reserved.Reservation, err error) {
	now := u.Instant()
	err = tx.enter()
	defer tx.leave()
	if err != nil {
		return nil, err
	}
	if r := tx.reservation(id); r != nil && r.IsDue(now) && tx.isFree(id) {
		tx.lockFree(id)
		due = copyOf(r)
		due.NowUs = now
	}
	return due, nil
}

// ForgetEnded is as on the DB, at the commit.
func (tx *Tx) ForgetEnded(ctx context.Context, u *store.Unit) (more bool, err error) {
	if tx.alone {
		return tx.DB.ForgetEnded(ctx, u)
	}
	before := u.Instant() - reserved.KeepEnded.Microseconds()
	err = tx.enter()
	defer tx.leave()
	if err != nil {
		return false, err
	}
	for id, r := range tx.reservations {
		if tx.isForgettable(r, before) {
			tx.locks[id] = &lock{holder: tx}
			tx.held = append(tx.held, id)
			tx.setReservation(id, nil)
		}
	}
	return false, nil
}

// PrunePages returns one part.
func (tx *Tx) PrunePages(context.Context, *store.Unit) (*store.PrunePages, error) {
	return store.OnePage(), nil
}

// Prune deletes the spare rows of limits that no transaction holds.
func (tx *Tx) Prune(_ context.Context, u *store.Unit, p *store.PrunePages,
	termsOf map[string][]bucket.Terms,
) (deleted int64, gotLock bool, err error) {
	p.Next()
	now := u.Instant()
	err = tx.enter()
	defer tx.leave()
	if err != nil {
		return 0, false, err
	}
	for name, terms := range termsOf {
		isSpare := store.IsSpare(terms, now)
		for k, s := range tx.buckets {
			if k.Name == name && tx.locks[k] == nil && isSpare(s) {
				delete(tx.buckets, k) // it stands for nothing: a rollback need not bring it back
				deleted++
			}
		}
	}
	return deleted, true, nil
}

// copyOf returns a copy of a reservation. The two share only memory that is never written.
func copyOf(r *reserved.Reservation) *reserved.Reservation {
	c := *r
	c.Buckets = slices.Clone(r.Buckets)
	return &c
}

func (tx *Tx) isFailed() bool {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	return tx.failed
}

func (tx *Tx) commit() error {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if tx.ended {
		return pgx.ErrTxClosed
	}
	maps.Copy(tx.buckets, tx.writes.buckets)
	maps.Copy(tx.reservations, tx.writes.reservations)
	for id, r := range tx.writes.reservations {
		if r == nil {
			delete(tx.reservations, id)
		}
	}
	tx.ended = true
	tx.release(0)
	return nil
}

// rollback forgets the writes.
func (tx *Tx) rollback() error {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if tx.ended {
		return pgx.ErrTxClosed
	}
	tx.ended = true
	tx.release(0)
	return nil
}
