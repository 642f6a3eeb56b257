package store

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Charge is what to take from buckets whatever they hold.
type Charge struct {
	Asks    []bucket.Ask
	Amounts []float64 // negative: to give back
	Until   []int64   // what is given back is given while the bucket's step begins no later
}

// Charge takes what the charge says, once. A bucket may go below zero.
func (s *Session) Charge(ctx context.Context, c Charge) error {
	if !decidesInSQL || bucket.AnySharded(c.Asks) || bucket.AnyEras(c.Asks) {
		return s.ChargeAll(ctx, []Charge{c})
	}
	if s.queue != nil {
		s.queue.Enter(ctx, c.Asks)
	}
	p := columnsOf(c.Asks)
	for i := range c.Asks {
		if c.Amounts[i] < 0 {
			p.capacities[i] = max(p.capacities[i], c.Asks[i].Most)
		}
	}
	return s.changeRows(ctx, c.Asks, s.statements.charge, p.names, p.keys, p.shards, c.Amounts, p.capacities, p.rates,
		p.stepUs, p.steps, p.phases, c.Until, s.now(), p.tolerances)
}

// ChargeAll takes what the charges say, once, on locked rows: those of all charges at once, in the order of locking.
func (s *Session) ChargeAll(ctx context.Context, charges []Charge) error {
	calls := make([][]bucket.Ask, len(charges))
	for i := range charges {
		calls[i] = charges[i].Asks
	}
	return s.ensureTx(ctx, func(tx *Session) error {
		l, err := tx.lock(ctx, &pgx.Batch{}, calls...)
		if err != nil {
			return err
		}
		for _, c := range charges {
			for i := range c.Asks {
				l.charge(&c.Asks[i], c.Amounts[i], c.Until[i])
			}
		}
		return tx.save(ctx, l)
	})
}

// Fill sets the buckets to their capacity, once.
func (s *Session) Fill(ctx context.Context, asks []bucket.Ask) error {
	if !decidesInSQL || bucket.AnyEras(asks) {
		return s.ensureTx(ctx, func(tx *Session) error {
			l, err := tx.lock(ctx, &pgx.Batch{}, asks)
			if err != nil {
				return err
			}
			l.fill(asks)
			return tx.save(ctx, l)
		})
	}
	rows, _ := bucket.RowsOf(asks)
	if s.queue != nil {
		s.queue.Enter(ctx, rows)
	}
	c := columnsOf(rows)
	return s.changeRows(ctx, rows, s.statements.fill, c.names, c.keys, c.shards, c.capacities, c.stepUs, c.phases, s.now(), c.tolerances)
}

// changeRows runs a statement that changes rows whatever they hold. Of several it waits for each only so long, unless it is
// in a caller's transaction; when that was not enough, it locks them first.
func (s *Session) changeRows(ctx context.Context, rows []bucket.Ask, statement string, arguments ...any) error {
	switch {
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
	return err
}

// changeFree is changeRows for when the rows are free, as they mostly are.
func (s *Session) changeFree(ctx context.Context, rows []bucket.Ask, statement string, arguments ...any) error {
	batch := &pgx.Batch{}
	batch.Queue(s.statements.boundWait, shortWait)
	batch.Queue(statement, arguments...)
	return s.send(ctx, batch, func(results pgx.BatchResults) error {
		if err := skip(results, 1); err != nil {
			return err
		}
		if _, err := results.Exec(); err != nil {
			return &shortWaitError{err, rows}
		}
		return nil
	})
}

// Change runs change until it needs no row that somebody holds and meets no conflict. In a transaction it runs it once.
func (s *Session) Change(ctx context.Context, verb string, change func(ctx context.Context, s *Session) error) error {
	return s.RetryHeld(ctx, func(s *Session) error {
		return s.retry(ctx, verb, func() error { return change(ctx, s) })
	})
}
