package store

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// savepoint is the place to which a call in a caller's transaction goes back, if it's refused after it has locked rows.
const savepoint = "ratelimit_take"

// postgres is the Engine on tables of Postgres, by statements that name as many rows as there are.
type postgres struct{}

// Read reads rows by buckets_read.sql, or by read_rows_1.
func (postgres) Read(ctx context.Context, u *Unit, rows []bucket.Ask) ([]bucket.Answer, error) {
	statement := u.statements.read
	if u.IsRouted() {
		statement = u.statements.readRows
	}
	found, err := u.conn.Query(ctx, statement, u.rowParameters(rows)...)
	if err != nil {
		return nil, err
	}
	answers, filtered, err := scanRows(found, rows)
	if err == nil && filtered {
		err = u.CheckHidden(ctx)
	}
	return answers, err
}

// LeavesOutHeld returns true: a transaction of the Owner's locks the rows that are free.
func (postgres) LeavesOutHeld() bool { return true }

// Lock locks and reads the rows of p in one round trip. A transaction of the Owner's leaves out rows that other transactions hold, except
// the row that it waits for, which it locks first. If the call has already waited for many rows, it also waits shortly for the others. A
// caller's transaction, which may already hold rows, waits for all of them.
func (e postgres) Lock(ctx context.Context, u *Unit, p *bucket.Page, mark bool) error {
	batch, statement, waited := &pgx.Batch{}, u.statements.lock, false
	if mark {
		QueueSavepoint(batch)
	}
	before := batch.Len()
	isOnly := len(p.Rows) == 1 && u.waitFor != nil && p.Rows[0].Key == *u.waitFor
	if u.mode == ownTx && !isOnly {
		waited = u.queueWait(batch, p.Rows)
		if u.waits < manyWaits {
			statement = u.statements.lockFree
		} else {
			e.QueueBound(batch, u, u.waitForOthers())
		}
	}
	between := batch.Len() - before
	u.queueLock(batch, statement, p.Rows)
	holding := u.queueLeases(batch, p)
	err := u.Send(ctx, batch, func(results pgx.BatchResults) error {
		err := skip(results, before)
		if err == nil && waited { // which may have made the row
			between--
			err = waitedFor(receiveLocked(results, p), *u.waitFor)
		}
		if err == nil {
			err = skip(results, between)
		}
		if err != nil {
			return err
		}
		if err = receiveLocked(results, p); isOnly { // for which it waits as long as the settings of the connection say
			err = waitedFor(err, *u.waitFor)
		} else {
			err = u.asShortWait(err, p.Rows)
		}
		if err != nil || len(holding) == 0 {
			return err
		}
		return receiveLeases(results, p, holding)
	})
	if err == nil && statement == u.statements.lock && !p.IsComplete() {
		err = fmt.Errorf("the statement left out some of %d rows", len(p.Rows))
	}
	return err
}

// queueLock queues a statement that locks rows: buckets_lock.sql, which waits for them, or buckets_lock_free.sql.
func (u *Unit) queueLock(batch *pgx.Batch, statement string, rows []bucket.Ask) {
	c := columnsOf(rows)
	batch.Queue(statement, c.names, c.keys, c.shards, c.capacities, c.stepUs, c.phases, u.AsOf())
}

// queueWait queues the wait for the row that the unit is to wait for, when it is one of rows. It is the first statement that locks a bucket's
// row. It makes the row when it is not there. It reports whether there is one to wait for.
func (u *Unit) queueWait(batch *pgx.Batch, rows []bucket.Ask) bool {
	for i := range rows {
		if u.waitFor != nil && rows[i].Key == *u.waitFor {
			u.queueLock(batch, u.statements.lock, rows[i:i+1])
			return true
		}
	}
	return false
}

// receiveLocked reads the answers of a statement that locks rows.
func receiveLocked(results pgx.BatchResults, p *bucket.Page) error {
	rows, err := results.Query()
	if err != nil {
		return err
	}
	defer rows.Close()
	var k bucket.Key
	var found bucket.State
	var made bool
	columns := []any{&k.Name, &k.Key, &k.Shard, &found.Value, &found.TS, &found.Capacity, nil, nil, &p.Now, &made}
	for rows.Next() {
		if found.Parts, err = ScanWithParts(rows, columns, 6); err != nil {
			return err
		}
		i, asked := p.Index(k)
		if !asked {
			return errors.New("the statement answered for a row that was not asked for")
		}
		p.Put(i, found, made)
	}
	return rows.Err()
}

// Save writes the rows of p with the reservations, with COMMIT in a transaction of the Owner's.
func (postgres) Save(ctx context.Context, u *Unit, p *bucket.Page, made ...Record) error {
	batch := &pgx.Batch{}
	u.QueueRecords(batch, made)
	u.queueSave(batch, p)
	return u.Finish(ctx, batch, p.Rows)
}

// QueueRecords queues the insertion of records, behind a bound if it travels with COMMIT: their table may be locked.
func (u *Unit) QueueRecords(batch *pgx.Batch, made []Record) {
	if len(made) > 0 && u.isLate() {
		u.Engine().QueueBound(batch, u, lateWait)
	}
	for _, r := range made {
		r.Queue(u, batch)
	}
}

// queueSave queues the statements that write the changed rows, and delete rows that were inserted as locks.
func (u *Unit) queueSave(batch *pgx.Batch, p *bucket.Page) {
	var saved, removed []bucket.Key
	var states []bucket.State
	p.Changes(func(k bucket.Key, state bucket.State) { saved, states = append(saved, k), append(states, state) },
		func(k bucket.Key) { removed = append(removed, k) })
	if len(saved) > 0 {
		names, keys, shards := keyColumns(len(saved), func(i int) bucket.Key { return saved[i] })
		values, ts, capacities, taken, leased := statesAsColumns(states)
		batch.Queue(u.statements.save, names, keys, shards, values, ts, capacities, taken, leased)
		u.queueLeaseChanges(batch, p)
	}
	if len(removed) > 0 {
		names, keys, shards := keyColumns(len(removed), func(i int) bucket.Key { return removed[i] })
		batch.Queue(u.statements.unmake, names, keys, shards)
	}
}

// Finish sends the last statements of a transaction. When they have to wait, for a lock on their table or for its next page, the short
// lock_timeout of an earlier statement ends the wait in a transaction of the Owner's.
func (u *Unit) Finish(ctx context.Context, batch *pgx.Batch, rows []bucket.Ask) error {
	return u.sendLater(ctx, batch, func(err error) error { return u.asShortWait(err, rows) })
}

// Undo goes back to the savepoint.
func (postgres) Undo(ctx context.Context, u *Unit, _ *bucket.Page) error {
	return u.BackToSavepoint(ctx)
}

// QueueSavepoint queues the statement that sets the savepoint.
func QueueSavepoint(batch *pgx.Batch) { batch.Queue("SAVEPOINT " + savepoint) }

// BackToSavepoint goes back to the savepoint, and removes it.
func (u *Unit) BackToSavepoint(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), EndTimeout) // half a call must not stay
	defer cancel()
	batch := &pgx.Batch{}
	batch.Queue("ROLLBACK TO SAVEPOINT " + savepoint)
	batch.Queue("RELEASE SAVEPOINT " + savepoint)
	if err := u.conn.SendBatch(ctx, batch).Close(); err != nil {
		return fmt.Errorf("undo: %w", err)
	}
	return nil
}

// Spoil has a statement fail.
func (postgres) Spoil(ctx context.Context, u *Unit) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), EndTimeout)
	defer cancel()
	_, _ = u.conn.Exec(ctx, "ROLLBACK TO SAVEPOINT "+savepoint+"_cancelled") // there is none
}

// QueueBound queues bound_waits_1: a statement that holds rows and waits for another keeps them from others (SQLSTATE 55P03 ends the wait).
func (postgres) QueueBound(batch *pgx.Batch, u *Unit, most time.Duration) {
	batch.Queue(u.statements.boundWaits, strconv.FormatInt(most.Milliseconds(), 10))
}
