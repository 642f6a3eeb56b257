package store

import (
	"context"
	"errors"
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

// The layouts of the tables, as far as a Store knows.
const (
	layoutUnknown = iota
	layoutPlain
	layoutPartitions18 // in partitions of PostgreSQL 18
	layoutRouted       // distributed by Citus
)

// madeTS is the ts of a row that a statement made in order to lock it, in place of the instant, which no such statement has. Such
// a row is full, whoever reads it.
const madeTS = bucket.LongAgo - 1

// routed reports whether statements are to name one row each.
func (s *Session) routed() bool { return s.Store != nil && s.IsRouted() }

// readsApart reports whether a statement that only reads is to name one row, too. It locks none, and so does not crash in partitions.
func (s *Session) readsApart() bool { return s.Store != nil && s.layout.Load() == layoutRouted }

// IsRouted reports whether statements are known to have to name one row each.
func (s *Store) IsRouted() bool { return s.layout.Load() >= layoutPartitions18 }

// IsPlain reports whether it is known that statements may name several rows.
func (s *Store) IsPlain() bool { return s.layout.Load() == layoutPlain }

// KnowsLayout reports whether it is known whether statements are to name one row each.
func (s *Store) KnowsLayout() bool { return s.layout.Load() != layoutUnknown || s.onEngine }

// LearnLayout finds out whether statements are to name one row each, unless that is known. It stays so for as long as the Store is there.
func (s *Session) LearnLayout(ctx context.Context) error {
	if s.KnowsLayout() {
		return nil
	}
	_, err := s.Way(ctx)
	return err
}

// learnLayout is LearnLayout where it is known whether Citus is there, and whether the buckets are in partitions of PostgreSQL 18.
func (s *Session) learnLayout(ctx context.Context, hasCitus, inPartitions18 bool) error {
	if s.KnowsLayout() {
		return nil
	}
	layout := int32(layoutPlain)
	if inPartitions18 {
		layout = layoutPartitions18
	}
	if hasCitus {
		rows, err := s.conn.Query(ctx, s.statements.layout, runAtOnce, s.table())
		if err != nil {
			return err
		}
		distributed, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[bool])
		if err != nil {
			return err
		}
		if distributed {
			layout = layoutRouted
		}
	}
	s.layout.CompareAndSwap(layoutUnknown, layout)
	return nil
}

// table returns the name of the table of buckets, for to_regclass.
func (s *Store) table() string { return pgx.Identifier{s.schema, "buckets"}.Sanitize() }

// queueClock queues the question what time it is.
func (s *Session) queueClock(batch *pgx.Batch) { batch.Queue(s.statements.clock, s.now()) }

// receiveClock reads the answer to that.
func receiveClock(results pgx.BatchResults) (now int64, err error) {
	err = results.QueryRow().Scan(&now)
	return now, err
}

// clock returns what time it is.
func (s *Session) clock(ctx context.Context) (now int64, err error) {
	batch := &pgx.Batch{}
	s.queueClock(batch)
	err = s.send(ctx, batch, func(results pgx.BatchResults) error {
		now, err = receiveClock(results)
		return err
	})
	return now, err
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

// readRouted is readRows.
func (s *Session) readRouted(ctx context.Context, rows []bucket.Ask) ([]bucket.Answer, error) {
	batch := &pgx.Batch{}
	s.queueClock(batch)
	for i := range rows {
		batch.Queue(s.statements.routedRead, keyOf(rows[i].Key)...)
	}
	answers := make([]bucket.Answer, len(rows))
	return answers, s.send(ctx, batch, func(results pgx.BatchResults) error {
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

// lockRouted is lockRows. A transaction of the session's own waits for one row, the one that it is to wait for or the first, so
// that those who want the same stand in line there and hold no other meanwhile. For the others it waits only so long: when that was
// not enough, it returns a heldError.
func (s *Session) lockRouted(ctx context.Context, batch *pgx.Batch, p *bucket.Page) error {
	order := make([]int, len(p.Rows))
	for i := range order {
		order[i] = i
	}
	if i := slices.IndexFunc(p.Rows, func(a bucket.Ask) bool { return s.waitFor != nil && a.Key == *s.waitFor }); i > 0 {
		order = slices.Insert(slices.Delete(order, i, i+1), 0, i)
	}
	before, bounds := batch.Len(), 0
	for n, i := range order {
		if n == 1 && s.mode == ownTx {
			bounds = s.boundWait(batch, s.waitForOthers())
		}
		r := &p.Rows[i]
		batch.Queue(s.statements.routedLock, append(keyOf(r.Key), r.Terms.Capacity, madeTS)...)
	}
	// Behind the locks, so that of two calls the one that decides later does so at a later instant. By the simple protocol all of a round trip
	// are at one instant, as the statements are that lock several rows.
	s.queueClock(batch)
	return s.send(ctx, batch, func(results pgx.BatchResults) (err error) {
		if err := skip(results, before); err != nil {
			return err
		}
		for n, i := range order {
			if n == 1 {
				if err := skip(results, bounds); err != nil {
					return err
				}
			}
			switch err := receiveLockedRow(results, p, i); {
			case err == nil:
			case s.mode == ownTx && n > 0: // a caller's transaction waits as long as its own settings say
				return asHeld(err, nil, p.Rows[i:i+1])
			case s.mode == ownTx:
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

// queueSaveRouted is queueSave.
func (s *Session) queueSaveRouted(batch *pgx.Batch, p *bucket.Page) {
	p.Changes(func(k bucket.Key, state bucket.State) {
		parts := state.Parts
		if parts == nil {
			parts = &bucket.Parts{}
		}
		batch.Queue(s.statements.routedSave, append(keyOf(k), state.Value, state.TS, parts.Taken, parts.Leases)...)
	}, func(k bucket.Key) { batch.Queue(s.statements.routedDelete, keyOf(k)...) })
}

// exchangeRouted sends a statement for each report, with what time it is, and sets what each answers.
func (s *Session) exchangeRouted(ctx context.Context, reports []*Report, queue func(batch *pgx.Batch, r *Report, now int64)) error {
	now, err := s.clock(ctx)
	if err != nil {
		return err
	}
	return exchangeFree(ctx, reports, func(free []*Report, wait time.Duration) error {
		return s.retryTx(ctx, "report", func(tx *Session) error {
			batch := &pgx.Batch{}
			tx.boundWait(batch, wait)
			return tx.exchangeOnce(ctx, batch, free, func(batch *pgx.Batch, r *Report) { queue(batch, r, now) })
		})
	})
}

// queueReportRouted queues what adds a report, or asks where there is none.
func (s *Session) queueReportRouted(batch *pgx.Batch, r *Report, now int64) {
	if r.Outcomes == 0 && r.RetryAfter == 0 {
		batch.Queue(s.statements.priceRead, r.Key.Name, r.Key.Key, now)
		return
	}
	paused := int64(0)
	if r.RetryAfter != 0 {
		paused = now + r.RetryAfter.Microseconds()
	}
	batch.Queue(s.statements.routedPriceReport, r.Key.Name, r.Key.Key, r.Outcomes, r.Accepted, r.Throttled, paused, r.FirstShare, now)
}

// queueTurnRouted queues what ends an epoch.
func (s *Session) queueTurnRouted(batch *pgx.Batch, r *Report, now int64) {
	u := &r.Upstream
	batch.Queue(s.statements.routedPriceTurn, r.Key.Name, r.Key.Key, u.Epoch, u.Outcomes, u.Accepted, u.Throttled, r.NextShare, r.Cut, now)
}
