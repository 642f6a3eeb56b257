// Package memory keeps buckets and reservations in memory, for the tests of users and for simulations. It replaces
// Postgres under package store, with rows, row locks and transactions, and makes no decisions. See store.Ledgers.
//
// Transactions are READ COMMITTED. Other transactions see the writes of a transaction once it has committed. A
// transaction that locks a row of another waits for the end of that transaction, in the order of arrival. A deadlock is
// found at once: the transaction that would complete it gets SQLSTATE 40P01, as from Postgres.
package memory

import (
	"context"
	"maps"
	"sync"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/reserved"
	"github.com/pgratelimit/pgratelimit/internal/engine/store"
)

// DB is a database in memory. Its methods are the methods of store.Ledgers outside a transaction.
type DB struct {
	mu           sync.Mutex
	buckets      map[bucket.Key]bucket.State
	reservations map[string]*reserved.Reservation
	locks        map[any]*lock // of a bucket.Key, or of the ID of a reservation
	fingerprint  string
}

// New returns a DB with nothing in it.
func New() *DB {
	return &DB{
		buckets: make(map[bucket.Key]bucket.State), reservations: make(map[string]*reserved.Reservation),
		locks: make(map[any]*lock),
	}
}

// ForgetEnded deletes reservations that ended long ago, and that no transaction has locked.
func (db *DB) ForgetEnded(_ context.Context, u *store.Unit) (more bool, err error) {
	before := u.Instant() - reserved.KeepEnded.Microseconds()
	db.mu.Lock()
	defer db.mu.Unlock()
	for id, r := range db.reservations {
		if db.isForgettable(r, before) {
			delete(db.reservations, id)
		}
	}
	return false, nil
}

// isForgettable reports whether a reservation ended before an instant, and no transaction has locked it.
func (db *DB) isForgettable(r *reserved.Reservation, before int64) bool {
	return r.State != reserved.Open && r.ExpiresUs < before && db.locks[r.ID] == nil
}

// Fingerprint returns the fingerprint that was stored first, and stores own if there is none.
func (db *DB) Fingerprint(own string) string {
	db.mu.Lock()
	defer db.mu.Unlock()
	if db.fingerprint == "" {
		db.fingerprint = own
	}
	return db.fingerprint
}

// Buckets returns a copy of the rows that were committed, for tests.
func (db *DB) Buckets() map[bucket.Key]bucket.State {
	db.mu.Lock()
	defer db.mu.Unlock()
	return maps.Clone(db.buckets)
}
