package store

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Charge is what to take from buckets whatever they hold. Up to when what was taken may be given back, the terms say that hold
// under the lock, and not those that the process takes for those of now.
type Charge struct {
	Asks    []bucket.Ask
	Amounts []float64 // negative: to give back
	Taken   []int64   // the instant at which was taken what is given back, or bucket.Whenever
}

// Charge takes what the charge says, once. A bucket may go below zero. It locks the rows of buckets of which the amount is
// not 0.
func (s *Session) Charge(ctx context.Context, c Charge) error {
	c = c.withoutZeros()
	if !s.inSQL() || bucket.AnySharded(c.Asks) || bucket.AnyEras(c.Asks) || !bucket.AllSteps(c.Asks) {
		return s.ChargeAll(ctx, []Charge{c})
	}
	if s.queue != nil {
		s.queue.Enter(ctx, c.Asks)
	}
	p, until := columnsOf(c.Asks), make([]int64, len(c.Asks))
	for i := range c.Asks {
		until[i] = c.Asks[i].RefundUntil(c.Taken[i])
		if c.Amounts[i] < 0 {
			p.capacities[i] = max(p.capacities[i], double(c.Asks[i].Most))
		}
	}
	return s.changeRows(ctx, c.Asks, s.statements.charge, p.names, p.keys, p.shards, c.Amounts, p.capacities, p.rates,
		p.stepUs, p.steps, p.phases, until, s.now(), p.tolerances)
}

// withoutZeros returns the charge without the buckets that it leaves as they are; all of them when it leaves all.
func (c Charge) withoutZeros() (charged Charge) {
	for i, amount := range c.Amounts {
		if amount != 0 {
			charged.Asks, charged.Amounts, charged.Taken = append(charged.Asks, c.Asks[i]), append(charged.Amounts, amount), append(charged.Taken, c.Taken[i])
		}
	}
	if len(charged.Asks) == 0 || len(charged.Asks) == len(c.Asks) {
		return c
	}
	return charged
}

// ChargeAll takes what the charges say, once, on locked rows: those of all charges at once, in the order of locking.
func (s *Session) ChargeAll(ctx context.Context, charges []Charge) error {
	calls := make([][]bucket.Ask, len(charges))
	for i := range charges {
		calls[i] = charges[i].Asks
	}
	return s.ensureTx(ctx, func(tx *Session) error {
		p, err := tx.lock(ctx, &pgx.Batch{}, calls...)
		if err != nil {
			return err
		}
		for _, c := range charges {
			for i := range c.Asks {
				p.Charge(&c.Asks[i], c.Amounts[i], c.Taken[i])
			}
		}
		return tx.save(ctx, p)
	})
}

// Fill sets the buckets to their capacity, once.
func (s *Session) Fill(ctx context.Context, asks []bucket.Ask) error {
	if !s.inSQL() || bucket.AnyEras(asks) || !bucket.AllSteps(asks) {
		return s.ensureTx(ctx, func(tx *Session) error {
			p, err := tx.lock(ctx, &pgx.Batch{}, asks)
			if err != nil {
				return err
			}
			p.Fill(asks)
			return tx.save(ctx, p)
		})
	}
	rows, _ := bucket.RowsOf(asks)
	if s.queue != nil {
		s.queue.Enter(ctx, rows)
	}
	c := columnsOf(rows)
	return s.changeRows(ctx, rows, s.statements.fill, c.names, c.keys, c.shards, c.capacities, c.stepUs, c.phases, s.now(), c.tolerances)
}

// changeRows runs a statement that changes rows whatever they hold. Of several it waits for each but the first only so
// long, unless it is in a caller's transaction; when that was not enough, it locks them first.
func (s *Session) changeRows(ctx context.Context, rows []bucket.Ask, statement string, arguments ...any) error {
	late := &pgx.Batch{}
	switch {
	case s.mode == ownTx && s.waitFor == nil && !s.bounded && s.boundLate(late):
		return s.changeLate(ctx, late, rows, statement, arguments...)
	case len(rows) == 1 || s.mode == callersTx:
	case s.waitFor == nil:
		return s.changeFree(ctx, rows, statement, arguments...)
	case s.mode == alone:
		return s.ensureTx(ctx, func(tx *Session) error { return tx.changeRows(ctx, rows, statement, arguments...) })
	default:
		if _, err := s.lock(ctx, &pgx.Batch{}, rows); err != nil {
			return err
		}
	}
	_, err := s.conn.Exec(ctx, statement, arguments...)
	if len(rows) == 1 && s.mode == ownTx {
		return waitedFor(err, rows[0].Key)
	}
	return err
}

// changeLate is changeRows with COMMIT, behind what is in batch: it waits for the first row up to lateWait, and for each other only so long.
func (s *Session) changeLate(ctx context.Context, batch *pgx.Batch, rows []bucket.Ask, statement string, arguments ...any) error {
	first := &rows[0].Key
	if len(rows) > 1 {
		batch.Queue(s.statements.wait, first.Name, first.Key, first.Shard)
		if err := s.finish(ctx, batch, rows[:1]); err != nil {
			return err
		}
		batch = &pgx.Batch{}
		s.boundWait(batch, shortWait)
	}
	batch.Queue(statement, arguments...)
	return s.sendLater(ctx, batch, func(err error) error { return asHeld(err, first, rows) })
}

// changeFree is changeRows for when the rows are free once the first of them is, as they mostly are: those who want the same
// rows stand in line for the first, and hold no other meanwhile.
func (s *Session) changeFree(ctx context.Context, rows []bucket.Ask, statement string, arguments ...any) error {
	batch := &pgx.Batch{}
	first := rows[0].Key
	batch.Queue(s.statements.wait, first.Name, first.Key, first.Shard)
	s.boundWait(batch, shortWait)
	batch.Queue(statement, arguments...)
	return s.send(ctx, batch, func(results pgx.BatchResults) error {
		if _, err := results.Exec(); err != nil {
			return waitedFor(err, first)
		}
		if err := skip(results, 1); err != nil {
			return err
		}
		if _, err := results.Exec(); err != nil {
			return asHeld(err, &first, rows)
		}
		return nil
	})
}

// Change runs change until it needs no row that somebody holds and meets no conflict. In a transaction it runs it once.
func (s *Session) Change(ctx context.Context, verb string, change func(ctx context.Context, s *Session) error) error {
	if err := s.LearnLayout(ctx); err != nil { // which a call that names no request has not asked for yet
		return err
	}
	return s.RetryHeld(ctx, func(s *Session) error {
		return s.retry(ctx, verb, func() error { return change(ctx, s) })
	})
}
