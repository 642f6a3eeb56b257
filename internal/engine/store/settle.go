package store

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// Settlement has settle_1 end a reservation of one bucket.
type Settlement struct {
	ID, Final string
	Bucket    *bucket.Key   // that the caller means; nil: whichever it is
	Cost      *float64      // of the work; nil: what was reserved
	Free      bool          // whether it may not cost more than was reserved
	Own       bool          // whether the terms of the reservation decide
	Terms     *bucket.Terms // the terms of now, if Own is false; nil: unknown

	Ended Ended // the answer
}

// Ended is the answer to a Settlement.
type Ended struct {
	Done   bool    // whether it's decided; if not, nothing has changed
	State  string  // before the call; "": there is no such reservation
	Amount float64 // that was charged, if the call has ended it
	Key    bucket.Key
	Plan   string
}

// Settles reports whether Settle can decide by statement under terms, if these are not nil.
func (s *Session) Settles(t *bucket.Terms) bool {
	isFit := t == nil || t.Kind.Statement() == bucket.StepStatement && (t.Windows == nil || t.Eras == nil)
	return s.memory == nil && isFit
}

// Settle ends a reservation by settle_1. Outside a transaction it doesn't wait for other transactions for long: then
// the call is not done.
func (s *Session) Settle(ctx context.Context, q *Settlement) error {
	if s.mode != alone {
		return s.OrSpoil(ctx, s.settleOn(ctx, s.conn, q))
	}
	_, err := s.owner.Once(ctx, nil, func(ctx context.Context, conn Conn) error { return s.settleOn(ctx, conn, q) })
	if wasOvertaken(err) || HasTimedOut(err) {
		q.Ended, err = Ended{}, nil
	}
	return err
}

// mostEnds bounds the calls of a transaction that ends reservations. settle_1 has a subtransaction, and a server finds
// up to 64 of a transaction quickly.
const mostEnds = 50

// settleFirst answers the calls that end reservations, and returns the others.
func (s *Session) settleFirst(ctx context.Context, calls []*Call) (others []*Call) {
	isEnd := func(c *Call) bool { return c.Settlement != nil }
	if !slices.ContainsFunc(calls, isEnd) {
		return calls
	}
	var ends []*Call
	for _, c := range calls {
		if isEnd(c) {
			ends = append(ends, c)
		} else {
			others = append(others, c)
		}
	}
	slices.SortFunc(ends, func(a, b *Call) int {
		return cmp.Or(a.Asks[0].Key.Compare(b.Asks[0].Key), cmp.Compare(a.Settlement.ID, b.Settlement.ID))
	})
	for part := range slices.Chunk(ends, mostEnds) {
		s.settleAll(ctx, part)
	}
	return others
}

// settleAll ends reservations in one transaction and one round trip. If another transaction is in the way of one of
// them, none is done.
func (s *Session) settleAll(ctx context.Context, calls []*Call) {
	var of []*Settlement
	claim := func() bool {
		for _, c := range calls {
			if c.Claim() {
				of = append(of, c.Settlement)
			}
		}
		return len(of) > 0
	}
	began := time.Now()
	_, err := s.owner.Once(ctx, claim, func(ctx context.Context, conn Conn) error { return s.settleOn(ctx, conn, of...) })
	if wasOvertaken(err) || HasTimedOut(err) || len(of) > 1 && isOfOne(err) {
		for _, q := range of {
			q.Ended = Ended{}
		}
		err = nil
	}
	if len(of) > 1 && err == nil {
		s.owner.Batched(ctx, len(of), time.Since(began))
	}
	for _, c := range calls {
		c.Answer(err)
	}
}

// settleOn sends settle_1 to a connection for each settlement.
func (u *Unit) settleOn(ctx context.Context, conn Conn, of ...*Settlement) (err error) {
	batch := &pgx.Batch{}
	for _, q := range of {
		q.Ended = Ended{}
		batch.Queue(u.statements.settle, u.settleParameters(q)...)
	}
	results := conn.SendBatch(ctx, batch)
	defer func() {
		if closeErr := results.Close(); err == nil {
			err = closeErr
		}
	}()
	for _, q := range of {
		var state, name, key, plan pgtype.Text
		var amount pgtype.Float8
		var shard pgtype.Int4
		e := &q.Ended
		if err := results.QueryRow().Scan(&e.Done, &state, &amount, &name, &key, &shard, &plan); err != nil {
			return err
		}
		e.State, e.Amount, e.Key, e.Plan = state.String, amount.Float64,
			bucket.Key{Name: name.String, Key: key.String, Shard: shard.Int32}, plan.String
	}
	return nil
}

// settleParameters returns the parameters of settle_1.
func (u *Unit) settleParameters(q *Settlement) []any {
	var name, key *string
	if q.Bucket != nil {
		name, key = &q.Bucket.Name, &q.Bucket.Key
	}
	var capacity, rate, steps *float64
	var step, phase, since, until, reset *int64
	if t := q.Terms; t != nil {
		capacity, rate, steps, step, phase = &t.Capacity, &t.Rate, &t.Steps, &t.Step, &t.Phase
		since, until = spanOf(t)
		if t.Eras != nil {
			reset = new(t.LastReset())
		}
	}
	return []any{
		q.ID, q.Final, name, key, q.Cost, !q.Free, q.Own, capacity, rate, steps, step, phase,
		since, until, reset, q.Terms != nil && q.Terms.Windows != nil, u.AsOf(), u.mode == alone,
	}
}
