package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Where Citus distributes the tables, it refuses a statement that names several rows in arrays, or runs it on every server. So a call locks its
// rows, decides in Go, and saves the rows, by statements that each name one row as parameters: Citus sends such a statement to the server that has
// the row. Statements that belong together are in a transaction that was begun, because without BEGIN each commits by itself. Citus also refuses
// a function that is not immutable in the values that a statement updates or returns.
//
// The same statements are used where the buckets are in partitions of PostgreSQL 18. There a statement that looks rows up in partitions, one after
// the other, crashes the server (segmentation fault) if another transaction has changed a row meanwhile. The executor checks the changed row by a
// second copy of the plan, which shares the data that choose the partition with the first copy, and frees them (EvalPlanQual and
// InitExecPartitionPruneContexts; seen with 18.4). For a row that parameters name, the partition is chosen when the statement begins.
//
// The clock of the server that the call is sent to decides (clock.sql), never the clock of a server that has rows.

// madeTS is the ts of a row that a statement made in order to lock it, in place of the instant, which no such statement has. Such
// a row is full, whoever reads it.
const madeTS = bucket.LongAgo - 1

// byRow is the Engine on such tables.
type byRow struct{ postgres }

// SetLayout tells the Store how the tables are laid out. That stays so for as long as the Store is there.
func (s *Store) SetLayout(distributed, inPartitions18 bool) {
	layout := int32(layoutPlain)
	switch {
	case distributed:
		layout = layoutRouted
	case inPartitions18:
		layout = layoutPartitions18
	}
	s.layout.CompareAndSwap(layoutUnknown, layout)
}

// Table returns the name of the table of buckets, for to_regclass.
func (s *Store) Table() string { return pgx.Identifier{s.schema, "buckets"}.Sanitize() }

// queueClock queues the question what time it is.
func (u *Unit) queueClock(batch *pgx.Batch) { batch.Queue(u.statements.clock, u.AsOf()) }

// receiveClock reads the answer to that.
func receiveClock(results pgx.BatchResults) (now int64, err error) {
	err = results.QueryRow().Scan(&now)
	return now, err
}

// clock returns what time it is.
func (u *Unit) clock(ctx context.Context) (now int64, err error) {
	return u.Ask(ctx, &pgx.Batch{}, func(pgx.BatchResults) error { return nil })
}

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
		if state.Parts, err = scanWithParts(rows, []any{&state.Value, &state.TS, nil, nil}, 2); err != nil {
			return state, false, err
		}
	}
	return state, found, rows.Err()
}

// Read reads rows, each by a statement. In partitions one statement reads all: it locks none, and so does not crash.
func (e byRow) Read(ctx context.Context, u *Unit, rows []bucket.Ask) ([]bucket.Answer, error) {
	if u.layout.Load() != layoutRouted {
		return e.postgres.Read(ctx, u, rows)
	}
	batch := &pgx.Batch{}
	u.queueClock(batch)
	for i := range rows {
		batch.Queue(u.statements.routedRead, keyOf(rows[i].Key)...)
	}
	answers := make([]bucket.Answer, len(rows))
	return answers, u.send(ctx, batch, func(results pgx.BatchResults) error {
		now, err := receiveClock(results)
		if err != nil {
			return err
		}
		for i := range rows {
			state, found, err := receiveRow(results)
			if err != nil {
				return err
			}
			if !found {
				state = rows[i].Terms.Full(now)
			}
			answers[i] = bucket.Answer{State: state, Now: now, Absent: !found}
		}
		return nil
	})
}

// LeavesOutHeld returns false.
func (byRow) LeavesOutHeld() bool { return false }

// Lock locks each row by a statement. It sets no savepoint. A transaction of the Owner's waits for one row, the one that it is to wait for or the first, so
// that those who want the same stand in line there and hold no other meanwhile. For the others it waits only so long: when that was
// not enough, it returns a heldError.
func (e byRow) Lock(ctx context.Context, u *Unit, p *bucket.Page, _ bool) error {
	batch := &pgx.Batch{}
	order := make([]int, len(p.Rows))
	for i := range order {
		order[i] = i
	}
	if i := slices.IndexFunc(p.Rows, func(a bucket.Ask) bool { return u.waitFor != nil && a.Key == *u.waitFor }); i > 0 {
		order = slices.Insert(slices.Delete(order, i, i+1), 0, i)
	}
	bounds := 0
	for n, i := range order {
		if n == 1 && u.mode == ownTx {
			before := batch.Len()
			e.QueueBound(batch, u, u.waitForOthers())
			bounds = batch.Len() - before
		}
		r := &p.Rows[i]
		batch.Queue(u.statements.routedLock, append(keyOf(r.Key), r.Terms.Capacity, madeTS)...)
	}
	// Behind the locks, so that of two calls the one that decides later does so at a later instant. By the simple protocol all of a round trip
	// are at one instant, as the statements are that lock several rows.
	u.queueClock(batch)
	return u.send(ctx, batch, func(results pgx.BatchResults) (err error) {
		for n, i := range order {
			if n == 1 {
				if err := skip(results, bounds); err != nil {
					return err
				}
			}
			switch err := receiveLockedRow(results, p, i); {
			case err == nil:
			case u.mode == ownTx && n > 0: // a caller's transaction waits as long as its own settings say
				return asHeld(err, nil, p.Rows[i:i+1])
			case u.mode == ownTx:
				return waitedFor(err, p.Rows[i].Key)
			default:
				return err
			}
		}
		p.Now, err = receiveClock(results)
		return err
	})
}

// receiveLockedRow reads the answer of routed_lock.sql for the i-th row.
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

// Save writes the rows that have changed, and deletes those that were inserted to lock them, each by a statement.
func (e byRow) Save(ctx context.Context, u *Unit, p *bucket.Page, made ...Record) error {
	batch := &pgx.Batch{}
	if len(made) > 0 && u.isLate() {
		e.QueueBound(batch, u, lateWait)
	}
	u.queueRecords(batch, made)
	p.Changes(func(k bucket.Key, state bucket.State) {
		parts := state.Parts
		if parts == nil {
			parts = &bucket.Parts{}
		}
		batch.Queue(u.statements.routedSave, append(keyOf(k), state.Value, state.TS, parts.Taken, parts.Leases)...)
	}, func(k bucket.Key) { batch.Queue(u.statements.routedDelete, keyOf(k)...) })
	return u.finish(ctx, batch, p.Rows)
}

// Undo deletes the rows that were inserted to lock them. After a refusal the rows stay locked, as one row does on plain Postgres. In a SERIALIZABLE
// transaction a row that is written behind a savepoint keeps a SIREAD lock on some versions of Postgres (on 15.20, and not on 15.18), by which the
// transaction may lose at COMMIT: that is where Citus does not say what became of it.
func (e byRow) Undo(ctx context.Context, u *Unit, p *bucket.Page) error { return e.Save(ctx, u, p) }

// QueueBound bounds the waits on the server that the statements are sent to: set_config would do so on one of the servers only.
func (byRow) QueueBound(batch *pgx.Batch, _ *Unit, most time.Duration) {
	batch.Queue("SET LOCAL citus.propagate_set_commands TO 'local'")
	batch.Queue(fmt.Sprintf("SET LOCAL lock_timeout TO %d", most.Milliseconds()))
}
