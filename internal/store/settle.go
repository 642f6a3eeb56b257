package store

import (
	"cmp"
	"context"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Settlement asks settle_1 to end a reservation of one bucket.
type Settlement struct {
	ID, Final string
	Bucket    *bucket.Key   // that the caller means; nil: whichever it is
	Cost      *float64      // of the work; nil: what was reserved
	Free      bool          // whether it may not cost more than was reserved
	Own       bool          // whether the terms of the reservation decide
	Terms     *bucket.Terms // the terms of now, if Own is false; nil: unknown
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

// Settle ends a reservation by settle_1. Outside a transaction it doesn't wait for other transactions for long: then the call is not done.
func (s *Session) Settle(ctx context.Context, q *Settlement) (e Ended, err error) {
	if s.mode != alone {
		e, err = s.settleOn(ctx, s.conn, q)
		return e, s.OrSpoil(ctx, err)
	}
	_, err = s.owner.Once(ctx, nil, func(ctx context.Context, conn Conn) (err error) {
		e, err = s.settleOn(ctx, conn, q)
		return err
	})
	if wasOvertaken(err) || HasTimedOut(err) {
		return Ended{}, nil
	}
	return e, err
}

// settleOn sends settle_1 to a connection.
func (u *Unit) settleOn(ctx context.Context, conn Conn, q *Settlement) (e Ended, err error) {
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
	rows, err := conn.Query(ctx, u.statements.settle, q.ID, q.Final, name, key, q.Cost, !q.Free, q.Own, capacity, rate, steps, step, phase,
		since, until, reset, q.Terms != nil && q.Terms.Windows != nil, u.AsOf(), u.mode == alone)
	if err != nil {
		return e, err
	}
	defer rows.Close()
	if !rows.Next() {
		return e, cmp.Or(rows.Err(), errNoAnswer)
	}
	var state, of, whose, plan pgtype.Text
	var amount pgtype.Float8
	var shard pgtype.Int4
	if err := rows.Scan(&e.Done, &state, &amount, &of, &whose, &shard, &plan); err != nil {
		return e, err
	}
	rows.Close() // or there is no Err yet
	e.State, e.Amount, e.Key, e.Plan = state.String, amount.Float64, bucket.Key{Name: of.String, Key: whose.String, Shard: shard.Int32}, plan.String
	return e, rows.Err()
}
