package store

import (
	"context"
	"slices"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// Charge takes amounts from buckets, also if they have fewer tokens. The terms in effect under the lock decide until
// when tokens can be returned, not the terms in effect at the process's own time.
type Charge struct {
	Asks    []bucket.Ask
	Amounts []float64 // negative: to give back
	Taken   []int64   // the instant at which the returned tokens were taken, or bucket.Whenever
}

// Add adds a bucket.
func (c *Charge) Add(a bucket.Ask, amount float64, taken int64) {
	c.Asks, c.Amounts, c.Taken = append(c.Asks, a), append(c.Amounts, amount), append(c.Taken, taken)
}

// withoutZeros returns the charge without the buckets that it leaves as they are.
func (c Charge) withoutZeros() (charged Charge) {
	for i, amount := range c.Amounts {
		if amount != 0 {
			charged.Add(c.Asks[i], amount, c.Taken[i])
		}
	}
	return charged
}

// Charge takes the amounts of the charges, once. A bucket may go below zero. It locks the rows of all charges at once,
// in the order of locking, except the rows of buckets with an amount of 0.
func (s *Session) Charge(ctx context.Context, charges ...Charge) error {
	return s.change(ctx, changesOf(charges))
}

// changesOf returns the changes that charges are.
func changesOf(charges []Charge) (changes []change) {
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
	return changes
}

// inOrder puts changes in the order of locking, each with an ask of its own.
func inOrder(changes []change) []change {
	slices.SortStableFunc(changes, func(a, b change) int { return a.ask.Key.Compare(b.ask.Key) })
	for i := range changes {
		changes[i].ask = new(*changes[i].ask)
	}
	return changes
}

// Fill sets buckets to their capacity.
func (s *Session) Fill(ctx context.Context, asks []bucket.Ask) error {
	changes := make([]change, len(asks))
	for i := range asks {
		changes[i] = change{ask: &asks[i], verb: "fill"}
	}
	return s.change(ctx, changes)
}

// change makes changes that nothing refuses, by decide_rows_1, or on a page in memory.
func (s *Session) change(ctx context.Context, changes []change) error {
	if len(changes) == 0 {
		return nil
	}
	changes = inOrder(changes)
	asks := make([]bucket.Ask, len(changes))
	for i := range changes {
		asks[i] = *changes[i].ask
		changes[i].ask = &asks[i]
	}
	if s.memory == nil {
		_, err := s.decideInGeneral(ctx, changes, nil)
		return err
	}
	return s.ChangeRows(ctx, asks, func(p *bucket.Page) {
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
	})
}

// ChargeLocked makes a charge that depends on what the rows of asks hold, once, and locks these before. On the page
// that amounts gets, it may charge them, too.
func (s *Session) ChargeLocked(ctx context.Context, asks []bucket.Ask, amounts func(p *bucket.Page) Charge) error {
	if s.memory != nil {
		return s.ChangeRows(ctx, asks, func(p *bucket.Page) {
			c := amounts(p.Clone())
			for i := range c.Asks {
				p.Charge(&c.Asks[i], c.Amounts[i], c.Taken[i])
			}
		})
	}
	return s.ensureTx(ctx, func(tx *Session) error {
		p := bucket.NewPage(asks)
		changes := make([]change, len(p.Rows))
		for i := range p.Rows {
			changes[i] = change{ask: &p.Rows[i], verb: "lock"}
		}
		answers, err := tx.decideInGeneral(ctx, changes, nil)
		if err != nil {
			return err
		}
		p.Now = answers[0].Now
		for i := range answers {
			p.Put(i, answers[i].State, false)
		}
		p.SetNow(asks)
		then := *tx
		then.at = &p.Now
		return then.Charge(ctx, amounts(p))
	})
}

// Change runs change until it needs no row that another transaction holds, and meets no conflict. In a transaction it
// runs it once.
func (s *Session) Change(ctx context.Context, verb string, change func(ctx context.Context, s *Session) error) error {
	return s.RetryHeld(ctx, func(s *Session) error {
		return s.retry(ctx, verb, func() error { return change(ctx, s) })
	})
}
