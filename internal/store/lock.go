package store

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// lock locks and reads every row of the calls' buckets, after what is in batch and in the same round trip, in the
// transaction of s. In a transaction of its own it returns a heldError when somebody holds a row.
func (s *Session) lock(ctx context.Context, batch *pgx.Batch, calls ...[]bucket.Ask) (*bucket.Page, error) {
	p, err := s.lockFree(ctx, batch, calls...)
	if err != nil {
		return nil, err
	}
	for _, asks := range calls {
		if row, held := p.Held(asks); held {
			return nil, &heldError{row: row}
		}
	}
	return p, nil
}

// lockFree locks and reads the rows of the calls' buckets, after what is in batch and in the same round trip. In a
// transaction of its own it leaves out those that somebody holds, but for the one that it is to wait for, which it locks
// first. When the call has waited for many it waits for the others too, for a little. In a caller's transaction, which
// may hold rows already, it waits for all of them, in the order of locking.
func (s *Session) lockFree(ctx context.Context, batch *pgx.Batch, calls ...[]bucket.Ask) (*bucket.Page, error) {
	p := bucket.NewPage(calls...)
	if err := s.lockRows(ctx, batch, p); err != nil {
		return nil, err
	}
	for _, row := range p.FromFuture() { // what is decided on them brings them back to the present
		s.owner.Mended(ctx, row.Name)
	}
	p.SetNow(calls...)
	if slices.ContainsFunc(calls, bucket.AnyUnknown) {
		return nil, ErrUnknownWindows
	}
	p.Settle(calls...)
	return p, nil
}

// lockRows locks and reads the rows of p as lockFree says.
func (s *Session) lockRows(ctx context.Context, batch *pgx.Batch, p *bucket.Page) error {
	if s.queue != nil {
		s.queue.Enter(ctx, p.Rows)
	}
	if s.engine != nil {
		return s.lockEngine(ctx, p)
	}
	if s.routed() {
		return s.lockRouted(ctx, batch, p)
	}
	statement := s.statements.lock
	before, waited := batch.Len(), false
	isOnly := len(p.Rows) == 1 && s.waitFor != nil && p.Rows[0].Key == *s.waitFor
	if s.mode == ownTx && !isOnly {
		waited = s.queueWait(batch, p.Rows)
		if s.waits < manyWaits {
			statement = s.statements.lockFree
		} else {
			s.boundWait(batch, s.waitForOthers())
		}
	}
	between := batch.Len() - before
	s.queueLock(batch, statement, p.Rows)
	err := s.send(ctx, batch, func(results pgx.BatchResults) error {
		err := skip(results, before)
		if err == nil && waited { // which may have made the row
			between--
			err = waitedFor(receiveLocked(results, p), *s.waitFor)
		}
		if err == nil {
			err = skip(results, between)
		}
		if err != nil {
			return err
		}
		if err = receiveLocked(results, p); isOnly { // for which it waits as long as the settings of the connection say
			return waitedFor(err, *s.waitFor)
		}
		return s.asShortWait(err, p.Rows)
	})
	if err == nil && statement == s.statements.lock && !p.IsComplete() {
		err = fmt.Errorf("the statement left out some of %d rows", len(p.Rows))
	}
	return err
}

// queueLock queues a statement that locks rows: buckets_lock.sql, which waits for them, or buckets_lock_free.sql.
func (s *Session) queueLock(batch *pgx.Batch, statement string, rows []bucket.Ask) {
	c := columnsOf(rows)
	batch.Queue(statement, c.names, c.keys, c.shards, c.capacities, c.stepUs, c.phases, s.now())
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
	columns := []any{&k.Name, &k.Key, &k.Shard, &found.Value, &found.TS, nil, nil, &p.Now, &made}
	for rows.Next() {
		if found.Parts, err = scanWithParts(rows, columns, 5); err != nil {
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

// save writes the rows that were changed, and deletes those that were made for nothing.
func (s *Session) save(ctx context.Context, p *bucket.Page) error {
	if s.engine != nil {
		return s.saveEngine(p)
	}
	batch := &pgx.Batch{}
	s.queueSave(batch, p)
	return s.finish(ctx, batch, p.Rows)
}

// finish sends the last statements of a transaction, in one of the session's own with COMMIT. When they have to wait, for a lock on their
// table or for its next page, the short lock_timeout of an earlier statement ends the wait in a transaction of the session's own.
func (s *Session) finish(ctx context.Context, batch *pgx.Batch, rows []bucket.Ask) error {
	return s.sendLater(ctx, batch, func(err error) error { return s.asShortWait(err, rows) })
}

// queueSave queues what save sends, if there is anything.
func (s *Session) queueSave(batch *pgx.Batch, p *bucket.Page) {
	if s.routed() {
		s.queueSaveRouted(batch, p)
		return
	}
	var saved, removed []bucket.Key
	var states []bucket.State
	p.Changes(func(k bucket.Key, state bucket.State) { saved, states = append(saved, k), append(states, state) },
		func(k bucket.Key) { removed = append(removed, k) })
	if len(saved) > 0 {
		names, keys, shards := keyColumns(len(saved), func(i int) bucket.Key { return saved[i] })
		values, ts, taken, leases := statesAsColumns(states)
		batch.Queue(s.statements.save, names, keys, shards, values, ts, taken, leases)
	}
	if len(removed) > 0 {
		names, keys, shards := keyColumns(len(removed), func(i int) bucket.Key { return removed[i] })
		batch.Queue(s.statements.unmake, names, keys, shards)
	}
}

// takeLocked decides on a call by locking all of its rows, in the transaction of s. A refusal leaves none of them
// locked, and none that it made, unless there was a clock to be put right.
func (s *Session) takeLocked(ctx context.Context, c *Call) error {
	if s.routed() {
		return s.takeLockedRouted(ctx, c)
	}
	batch := &pgx.Batch{}
	s.queueSavepoint(batch)
	p, err := s.lock(ctx, batch, c.Asks)
	if errors.Is(err, ErrUnknownWindows) {
		return errors.Join(err, s.undo(ctx))
	}
	if err != nil {
		return err
	}
	c.takeOn(p)
	if p.HasChanged() {
		return s.save(ctx, p)
	}
	return s.undo(ctx)
}

// takeOn decides on c on a page, and takes.
func (c *Call) takeOn(p *bucket.Page) {
	if c.UpTo > 0 {
		c.Taken, c.Answers = p.TakeUpTo(c.Asks, c.UpTo, nil)
		return
	}
	c.Answers = p.Take(c.Asks, c.one[:0])
}
