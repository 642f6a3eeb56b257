// Package byrow keeps buckets in tables that Citus distributes, where a statement must name one row.
package byrow

import (
	"context"
	"embed"
	"errors"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// Where Citus distributes the tables, it refuses a statement that names several rows in arrays, or runs it on every server. So a
// call locks its rows, decides in Go, and saves the rows. Each statement names one row as parameters, and Citus sends it to the
// server that has the row. Statements that belong together are in a transaction that was begun, because without BEGIN each commits
// by itself. Citus also refuses a function that is not immutable in the values that a statement updates or returns.
//
// The clock of the server that the call is sent to decides (clock.sql), never the clock of a server that has rows.

// madeTS is the ts of a row that a statement inserted as a lock: such a statement has no instant. Every reader takes such
// a row for a full one.
const madeTS = bucket.LongAgo - 1

// Distributed is the store.Engine on tables that Citus distributes.
type Distributed struct{ store.Engine }

// New returns a store for tables that Citus may distribute.
func New(o store.Options) *store.Store {
	o.Distributed = Distributed{Engine: store.Postgres()}
	return store.New(o)
}

//go:embed sql/*.sql
var files embed.FS

// keyOf returns the parameters that name a row.
func keyOf(k bucket.Key) []any { return []any{k.Name, k.Key, k.Shard} }

// receiveRow reads the answer of a statement that reads one row.
func receiveRow(results pgx.BatchResults) (state bucket.State, found bool, err error) {
	rows, err := results.Query()
	if err != nil {
		return state, false, err
	}
	defer rows.Close()
	for rows.Next() {
		found = true
		if state.Parts, err = store.ScanWithParts(rows, []any{&state.Value, &state.TS, &state.Capacity, nil, nil}, 3); err != nil {
			return state, false, err
		}
	}
	return state, found, rows.Err()
}

// LeavesOutHeld returns false.
func (Distributed) LeavesOutHeld() bool { return false }

// Lock locks each row by a statement. It sets no savepoint. A transaction of the Owner's waits without a bound for only one row,
// waitFor or the first. So calls for the same rows queue there, and hold no other row meanwhile. For the other rows it waits a
// bounded time, and then returns an error, with which the call waits for that row first.
func (Distributed) Lock(ctx context.Context, u *store.Unit, p *bucket.Page, _ bool) error {
	batch := &pgx.Batch{}
	order := make([]int, len(p.Rows))
	for i := range order {
		order[i] = i
	}
	if i := u.Awaited(p.Rows); i > 0 {
		order = slices.Insert(slices.Delete(order, i, i+1), 0, i)
	}
	bounds := 0
	for n, i := range order {
		if n == 1 {
			bounds = u.QueueShortWait(batch)
		}
		r := &p.Rows[i]
		batch.Queue(u.Statement(files, "row_lock"), append(keyOf(r.Key), r.Terms.Capacity, madeTS)...)
	}
	for i := range p.Rows {
		if r := &p.Rows[i]; p.ReadsLeases(i) {
			batch.Queue(u.Statement(files, "row_leases"), r.Key.Name, r.Key.Key)
		}
	}
	// The clock is read after the locks, so that a later decision has a later instant. In the simple protocol all statements of a round trip
	// have one instant, as in the statements that lock several rows.
	u.QueueClock(batch)
	return u.Send(ctx, batch, func(results pgx.BatchResults) (err error) {
		for n, i := range order {
			if n == 1 {
				for range bounds {
					if _, err := results.Exec(); err != nil {
						return err
					}
				}
			}
			if err := receiveLockedRow(results, p, i); err != nil {
				return u.WaitEnded(err, p.Rows[i], n == 0)
			}
		}
		for i := range p.Rows {
			if p.ReadsLeases(i) {
				if err := receiveLeases(results, p, i); err != nil {
					return err
				}
			}
		}
		p.Now, err = store.ReceiveClock(results)
		return err
	})
}

// receiveLeases reads the answer of row_leases.sql for the i-th row.
func receiveLeases(results pgx.BatchResults, p *bucket.Page, i int) error {
	rows, err := results.Query()
	if err != nil {
		return err
	}
	var h bucket.Held
	_, err = pgx.ForEachRow(rows, []any{&h.Fence, &h.End, &h.Slots}, func() error {
		p.PutLease(i, h)
		return nil
	})
	return err
}

// receiveLockedRow reads the answer of row_lock.sql for the i-th row.
func receiveLockedRow(results pgx.BatchResults, p *bucket.Page, i int) error {
	state, found, err := receiveRow(results)
	if err != nil {
		return err
	}
	if !found {
		return errors.New("the statement answered for no row")
	}
	p.Put(i, state, state.TS == madeTS)
	return nil
}

// Save writes the changed rows, and deletes rows that were inserted as locks, each by a statement.
func (Distributed) Save(ctx context.Context, u *store.Unit, p *bucket.Page, made ...store.Record) error {
	batch := &pgx.Batch{}
	u.QueueRecords(batch, made)
	p.Changes(func(k bucket.Key, state bucket.State) {
		parts := state.Parts
		if parts == nil {
			parts = &bucket.Parts{}
		}
		first, last := state.Ends()
		batch.Queue(u.Statement(files, "row_save"), append(keyOf(k), state.Value, state.TS, state.Capacity, parts.Taken, state.LastFence(), first, last)...)
	}, func(k bucket.Key) { batch.Queue(u.Statement(files, "row_delete"), keyOf(k)...) })
	p.LeaseChanges(func(k bucket.Key, h bucket.Held) {
		batch.Queue(u.Statement(files, "row_lease_save"), k.Name, k.Key, h.Fence, h.End, h.Slots)
	}, func(k bucket.Key, fence int64) {
		batch.Queue(u.Statement(files, "row_lease_delete"), k.Name, k.Key, &fence)
	})
	return u.Finish(ctx, batch, p.Rows)
}

// Undo deletes the rows that were inserted to lock them. After a refusal the rows stay locked, as one row does on plain Postgres.
// In a SERIALIZABLE transaction, a row that is written after a savepoint keeps a SIREAD lock on some versions of Postgres (on
// 15.20, not on 15.18). With it the transaction may conflict at COMMIT, where Citus does not report the outcome.
func (e Distributed) Undo(ctx context.Context, u *store.Unit, p *bucket.Page) error {
	return e.Save(ctx, u, p)
}
