package store

import (
	"cmp"
	"context"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Row is what reserve_1 keeps of a reservation, besides what it takes.
type Row struct {
	ID             string
	Plan, Calendar *string
	NotBeforeUs    int64
	StaleUs        *int64 // after it is ready; nil: never
	ExpireUs       int64  // after it is ready
	Release        bool
}

// reserves reports whether reserve_1 can decide on c and keep its record. On tables that Citus distributes, the record may be on another
// server than the row.
func (s *Session) reserves(c *Call) bool {
	return decidesInSQL && c.Reserve != nil && s.memory == nil && !s.IsRouted() && (s.mode != alone || s.waitFor == nil) &&
		len(c.Asks) == 1 && c.traits.Statement == bucket.StepStatement && !c.traits.Costless
}

// reserve takes from one bucket and keeps the record of that, by reserve_1. Outside a transaction its caller waits for the answer from
// when it is sent on, so that what it reserved is known; if another transaction is in the way, it's soon left to a transaction.
func (s *Session) reserve(ctx context.Context, c *Call) (v verdict, err error) {
	if s.mode != alone {
		s.EnterQueue(ctx, c.Asks)
		return s.reserveOn(ctx, s.conn, c)
	}
	ran, err := s.owner.Once(ctx, c.Claim, func(ctx context.Context, conn Conn) (err error) {
		v, err = s.reserveOn(ctx, conn, c)
		return err
	})
	if !ran && err == nil || wasOvertaken(err) || HasTimedOut(err) || err == nil && v == undecided {
		c.way = inOwnTx
		return undecided, nil
	}
	return v, err
}

// reserveOn sends reserve_1 to a connection.
func (u *Unit) reserveOn(ctx context.Context, conn Conn, c *Call) (v verdict, err error) {
	a, row := &c.Asks[0], c.Reserve.Row(&c.Asks[0])
	t := &a.Terms
	since, until := spanOf(t)
	rows, err := conn.Query(ctx, u.statements.reserve, row.ID,
		a.Key.Name, a.Key.Key, a.Key.Shard, a.Cost, t.Capacity, t.Rate, t.Steps, t.Step, t.Phase, a.Lowest, since, until, u.AsOf(), u.mode == alone,
		row.Plan, row.Calendar, row.NotBeforeUs, row.StaleUs, row.ExpireUs, row.Release, !a.Unenforced)
	if err != nil {
		return undecided, err
	}
	defer rows.Close()
	if !rows.Next() {
		return undecided, cmp.Or(rows.Err(), errNoAnswer)
	}
	var is struct { // one allocation
		allowed         pgtype.Bool
		value, capacity pgtype.Float8
		ts, ready       pgtype.Int8
		now             int64
	}
	if err := rows.Scan(&is.allowed, &is.value, &is.ts, &is.capacity, &is.now, &is.ready); err != nil {
		return undecided, err
	}
	rows.Close() // or there is no Err yet
	if err := rows.Err(); err != nil || !is.allowed.Valid {
		return undecided, err
	}
	state := bucket.State{Value: is.value.Float64, TS: is.ts.Int64, Capacity: is.capacity.Float64}
	c.Answers = append(c.one[:0], bucket.Answer{Allowed: is.allowed.Bool, Now: is.now, State: state})
	if !is.allowed.Bool {
		return refused, nil
	}
	c.Record = c.Reserve.Made(row, is.ready.Int64)
	return allowed, nil
}
