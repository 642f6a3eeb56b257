package store

import (
	"context"
	"slices"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Charge takes amounts from buckets, also if they have fewer tokens. The terms in effect under the lock decide until when tokens
// can be returned, not the terms in effect at the process's own time.
type Charge struct {
	Asks    []bucket.Ask
	Amounts []float64 // negative: to give back
	Taken   []int64   // the instant at which the returned tokens were taken, or bucket.Whenever
}

// withoutZeros returns the charge without the buckets that it leaves as they are.
func (c Charge) withoutZeros() (charged Charge) {
	for i, amount := range c.Amounts {
		if amount != 0 {
			charged.Asks, charged.Amounts, charged.Taken = append(charged.Asks, c.Asks[i]), append(charged.Amounts, amount), append(charged.Taken, c.Taken[i])
		}
	}
	return charged
}

// Charge takes the amounts of the charges, once. A bucket may go below zero. It locks the rows of all charges at once, in the order of
// locking, except the rows of buckets with an amount of 0.
func (s *Session) Charge(ctx context.Context, charges ...Charge) error {
	var changes []change
	for _, c := range charges {
		c = c.withoutZeros()
		for i, amount := range c.Amounts {
			verb := "charge"
			if amount < 0 {
				verb, amount = "credit", -amount
			}
			changes = append(changes, change{ask: &c.Asks[i], verb: verb, amount: amount, taken: c.Taken[i]})
		}
	}
	return s.change(ctx, changes)
}

// Fill sets buckets to their capacity.
func (s *Session) Fill(ctx context.Context, asks []bucket.Ask) error {
	changes := make([]change, len(asks))
	for i := range asks {
		changes[i] = change{ask: &asks[i], verb: "fill"}
	}
	return s.change(ctx, changes)
}

// change makes changes that nothing refuses, by decide_rows_1 or else on a page.
func (s *Session) change(ctx context.Context, changes []change) error {
	if len(changes) == 0 {
		return nil
	}
	slices.SortStableFunc(changes, func(a, b change) int { return a.ask.Key.Compare(b.ask.Key) })
	asks := make([]bucket.Ask, len(changes))
	for i := range changes {
		asks[i] = *changes[i].ask
		changes[i].ask = &asks[i]
	}
	if s.isGeneral(asks) {
		_, err := s.decideInGeneral(ctx, changes, nil)
		return err
	}
	return s.ChangeRows(ctx, func(p *bucket.Page) {
		for _, c := range changes {
			switch c.verb {
			case "fill":
				p.Fill([]bucket.Ask{*c.ask})
			case "credit":
				p.Charge(c.ask, -c.amount, c.taken)
			default:
				p.Charge(c.ask, c.amount, c.taken)
			}
		}
	}, asks)
}

// ChangeRows changes the rows of the calls' buckets, once, on rows that it locks: in the transaction of the session, or else in one of
// its own. For one call it waits for the first row before it locks others, so that calls for the same rows queue there.
func (s *Session) ChangeRows(ctx context.Context, change func(p *bucket.Page), calls ...[]bucket.Ask) error {
	if len(calls) == 1 && len(calls[0]) > 0 && s.waitFor == nil {
		first := calls[0][0].Key
		s = s.waitingFor(&first, 0)
	}
	return s.ensureTx(ctx, func(tx *Session) error {
		p, err := tx.lock(ctx, false, calls...)
		if err == nil && s.mode == alone {
			err = tx.relax(ctx, p)
		}
		if err != nil {
			return err
		}
		change(p)
		return tx.save(ctx, p)
	})
}

// Change runs change until it needs no row that another transaction holds, and meets no conflict. In a transaction it runs it once.
func (s *Session) Change(ctx context.Context, verb string, change func(ctx context.Context, s *Session) error) error {
	return s.RetryHeld(ctx, func(s *Session) error {
		return s.retry(ctx, verb, func() error { return change(ctx, s) })
	})
}
