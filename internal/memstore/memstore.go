// Package memstore keeps buckets and reservations in memory, for the tests of users. It replaces Postgres under package store, with
// rows, row locks and transactions, and makes no decisions. See store.Engine.
//
// Transactions are READ COMMITTED. Other transactions see the writes of a transaction once it has committed. A transaction that locks
// a row of another waits for the end of that transaction, in the order of arrival. A deadlock is
// found at once: the transaction that would complete it gets SQLSTATE 40P01, as from Postgres.
package memstore

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/adaptive"
	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/reserved"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// DB is a database in memory. Its methods are the methods of store.Engine outside a transaction.
type DB struct {
	mu           sync.Mutex
	buckets      map[bucket.Key]bucket.State
	reservations map[string]*reserved.Reservation
	prices       map[bucket.Key]*price
	locks        map[any]*lock // of a bucket.Key, or of the ID of a reservation
	fingerprint  string
}

// New returns a DB with nothing in it.
func New() *DB {
	return &DB{
		buckets: make(map[bucket.Key]bucket.State), reservations: make(map[string]*reserved.Reservation),
		prices: make(map[bucket.Key]*price), locks: make(map[any]*lock),
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

// price is the state of an upstream.
type price struct {
	adaptive.Known
	seenUs int64
}

// answer sets the answer to the report.
func (p *price) answer(r *adaptive.Report, now int64) {
	if r.IsKnown = p != nil; p != nil {
		r.Known = p.Known
		r.Known.NowUs = now
	}
}

// Report mirrors price_report.sql and price_read.sql.
func (db *DB) Report(_ context.Context, u *store.Unit, reports []*adaptive.Report, _ time.Duration) error {
	now := u.Instant()
	db.mu.Lock()
	defer db.mu.Unlock()
	for _, r := range reports {
		p := db.prices[r.Key]
		if r.OnlyAsks() {
			p.answer(r, now)
			continue
		}
		if p == nil {
			p = &price{Known: adaptive.Known{BegunUs: now, Share: 1}}
			db.prices[r.Key] = p
		}
		p.seenUs = now
		p.Outcomes, p.Accepted, p.Throttled = p.Outcomes+r.Outcomes, p.Accepted+r.Accepted, p.Throttled+r.Throttled
		if r.RetryAfter > 0 {
			p.PausedUntilUs = max(p.PausedUntilUs, now+r.RetryAfter.Microseconds())
		}
		p.answer(r, now)
	}
	return nil
}

// Turn mirrors price_turn.sql.
func (db *DB) Turn(_ context.Context, _ *store.Unit, reports []*adaptive.Report, _ time.Duration) error {
	db.mu.Lock()
	defer db.mu.Unlock()
	for _, r := range reports {
		p, known := db.prices[r.Key], &r.Known
		if p == nil || p.Epoch != known.Epoch {
			r.IsKnown = false
			continue
		}
		p.Epoch, p.BegunUs, p.Share, p.Cut = p.Epoch+1, known.NowUs, r.NextShare, r.Cut
		p.Outcomes = max(p.Outcomes-known.Outcomes, 0)
		p.Accepted, p.Throttled = max(p.Accepted-known.Accepted, 0), max(p.Throttled-known.Throttled, 0)
		p.answer(r, known.NowUs)
	}
	return nil
}

// ForgetPrices deletes prices without a report for a long time.
func (db *DB) ForgetPrices(_ context.Context, u *store.Unit) error {
	before := u.Instant() - adaptive.KeepPrices.Microseconds()
	db.mu.Lock()
	defer db.mu.Unlock()
	for k, p := range db.prices {
		if p.seenUs < before {
			delete(db.prices, k)
		}
	}
	return nil
}

// Buckets returns a copy of the rows that were committed, for tests.
func (db *DB) Buckets() map[bucket.Key]bucket.State {
	db.mu.Lock()
	defer db.mu.Unlock()
	return maps.Clone(db.buckets)
}
