package store

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// Row is what reserve_1 or reserve_rows_1 keeps of a reservation, besides what it takes.
type Row struct {
	ID          string
	Plans       []string // of each bucket's key; empty if no key is on a plan
	NotBeforeUs int64
	StaleUs     *int64 // after it is ready; nil: never
	ExpireUs    int64  // after it is ready
	Release     bool

	Known  *Known // the reservation that takes again; nil: a new one
	Starts bool   // whether the work starts at once if it may
}

// Known is what a caller knows of a reservation.
type Known struct {
	State     string
	ReadyUs   int64
	StartedUs *int64
	ExpiresUs int64
}

// plan returns the plan of the key of a bucket, as a parameter.
func (r *Row) plan(i int) *string {
	if i >= len(r.Plans) || r.Plans[i] == "" {
		return nil
	}
	return &r.Plans[i]
}

// calendarOf returns the stored form of the windows of a calendar, as a parameter.
func calendarOf(t *bucket.Terms) *string {
	if t.Windows == nil {
		return nil
	}
	return new(t.Windows.String())
}

// reserves reports whether reserve_1 can decide on c and keep its record.
func (s *Session) reserves(c *Call) bool {
	return c.Reserve != nil && s.memory == nil && (s.mode != alone || s.waitFor == nil) &&
		len(c.Asks) == 1 && c.traits.Statement == bucket.StepStatement && !c.traits.Costless
}

// reserve takes from one bucket and keeps the record of that, by reserve_1. Outside a transaction its caller waits for
// the answer from when it is sent on, so that what it reserved is known; if another transaction is in the way, it's
// soon left to a transaction.
func (s *Session) reserve(ctx context.Context, c *Call) (v verdict, err error) {
	if s.mode != alone {
		s.EnterQueue(ctx, c.Asks)
		return s.reserveOn(ctx, s.conn, c)
	}
	ran, err := s.owner.Once(ctx, c.Claim, func(ctx context.Context, conn Conn) (err error) {
		v, err = s.reserveOn(ctx, conn, c)
		return err
	})
	if !ran && err == nil || wasOvertaken(err) || HasTimedOut(err) {
		if c.passes && err != nil {
			return undecided, &heldError{c.Asks[0].Key, err}
		}
		c.way = inOwnTx
		return undecided, nil
	}
	return v, err
}

// reserveOn sends reserve_1 to a connection.
func (u *Unit) reserveOn(ctx context.Context, conn Conn, c *Call) (v verdict, err error) {
	row := c.Reserve.Row()
	rows, err := conn.Query(ctx, u.statements.reserve, u.reserveParameters(c, &row)...)
	if err != nil {
		return undecided, err
	}
	return c.receiveReserved(rows, row)
}

// reserveParameters returns the parameters of reserve_1.
func (u *Unit) reserveParameters(c *Call, row *Row) []any {
	a := &c.Asks[0]
	t := &a.Terms
	since, until := spanOf(t)
	return []any{
		row.ID, a.Key.Name, a.Key.Key, a.Key.Shard, a.Cost, t.Capacity, t.Rate, t.Steps, t.Step, t.Phase, a.Lowest, since,
		until, u.AsOf(), u.mode == alone,
		row.plan(0), calendarOf(t), row.NotBeforeUs, row.StaleUs, row.ExpireUs, row.Release, !a.Unenforced,
	}
}

// receiveReserved reads the answer of reserve_1.
func (c *Call) receiveReserved(rows pgx.Rows, row Row) (v verdict, err error) {
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
	state := bucket.State{Value: is.value.Float64, TS: is.ts.Int64, Capacity: is.capacity.Float64}
	c.Answers, c.Record = append(c.one[:0], bucket.Answer{
		Allowed: is.allowed.Bool, Absent: !is.ts.Valid, Now: is.now,
		State: state,
	}), nil
	if err := rows.Err(); err != nil || !is.allowed.Valid {
		return undecided, err
	}
	if !is.allowed.Bool {
		return refused, nil
	}
	c.Record = c.Reserve.Made(row, is.ready.Int64)
	return allowed, nil
}

// reserveAll has reserve_1 and reserve_rows_1 decide on the calls of a batch, one after the other in one transaction
// and one round trip. It returns the calls that are left, because these leave them undecided, or because another
// transaction is in the way and nothing was reserved.
func (s *Session) reserveAll(ctx context.Context, calls []*Call) (left []*Call) {
	var sent []*Call
	claim := func() bool {
		for _, c := range calls {
			if c.Claim() {
				sent = append(sent, c)
			}
		}
		slices.SortStableFunc(sent, func(a, b *Call) int { return a.Asks[0].Key.Compare(b.Asks[0].Key) })
		return len(sent) > 0
	}
	began := time.Now()
	ran, err := s.owner.Once(ctx, claim,
		func(ctx context.Context, conn Conn) error { return s.reserveAllOn(ctx, conn, sent) })
	var refusal *pgconn.PgError
	switch {
	case !ran && err == nil, errors.As(err, &refusal) && refusal.SeverityUnlocalized == "ERROR": // nothing was reserved
		return calls
	case err != nil:
		for _, c := range calls {
			c.Answer(err)
		}
		return nil
	}
	s.owner.Batched(ctx, len(sent), time.Since(began))
	for _, c := range sent {
		if c.verdict == undecided {
			left = append(left, c)
			continue
		}
		c.Answer(nil)
	}
	slices.SortFunc(left, func(a, b *Call) int { return a.seq - b.seq })
	return left
}

// reserveAllOn sends reserve_1 or reserve_rows_1 for each call to a connection.
func (s *Session) reserveAllOn(ctx context.Context, conn Conn, calls []*Call) (err error) {
	batch, rows, all := &pgx.Batch{}, make([]Row, len(calls)), make([][]rowAsk, len(calls))
	for i, c := range calls {
		rows[i] = c.Reserve.Row()
		if s.reserves(c) {
			batch.Queue(s.statements.reserve, s.reserveParameters(c, &rows[i])...)
			continue
		}
		all[i] = elementsOf(takesOf(c.Asks), make([]*int64, len(c.Asks)), s.Instant())
		text, err := keptText(all[i], c.Asks, &rows[i])
		if err != nil {
			return err
		}
		batch.Queue(s.statements.reserveRows, s.keepParameters(text, s.AsOf(), new(int32(0)), &rows[i])...)
	}
	results := conn.SendBatch(ctx, batch)
	defer func() {
		if closeErr := results.Close(); err == nil {
			err = closeErr
		}
	}()
	for i, c := range calls {
		found, err := results.Query()
		if err != nil {
			return err
		}
		if all[i] != nil {
			c.verdict, err = s.receiveRows(ctx, c, found, all[i], rows[i])
		} else {
			c.verdict, err = c.receiveReserved(found, rows[i])
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// receiveRows reads the answer of reserve_rows_1.
func (s *Session) receiveRows(ctx context.Context, c *Call, found pgx.Rows, elements []rowAsk,
	row Row,
) (v verdict, err error) {
	answers, decided, ready, err := s.scanGeneral(ctx, found, elements)
	if held := (*heldError)(nil); errors.As(err, &held) { // the other calls may go on
		return undecided, nil
	}
	if err != nil || !decided {
		return undecided, err
	}
	c.Answers, c.Record = answers, nil
	if !bucket.AllAllowed(answers) {
		return refused, nil
	}
	c.Record = c.Reserve.Made(row, ready)
	return allowed, nil
}
