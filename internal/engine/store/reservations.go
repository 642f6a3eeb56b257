package store

import (
	"cmp"
	"context"
	"encoding/json"
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

// attempt is a call that reserve decides on.
type attempt struct {
	*Call
	row      Row
	elements []rowAsk // of the call's inquiry; nil: reserve_1 decides
	ready    int64    // when the work may run, if the call is allowed
}

// reserves reports whether reserve decides on c.
func (s *Session) reserves(c *Call) bool { return c.Reserve != nil && !c.Look && s.memory == nil }

// attempt returns a call for reserve, which calls reserve_1 if that is for such a call.
func (s *Session) attempt(c *Call) attempt {
	c.inquiry, c.held = nil, nil
	if s.mode == alone && s.waitFor != nil || len(c.Asks) > 1 || c.traits.Statement != bucket.StepStatement ||
		c.traits.Costless {
		c.inquiry = newInquiry(takesOf(c.Asks), c.Answers)
	}
	return attempt{Call: c}
}

// reserve decides on every Reserve that is not in memory: it has reserve_1 or reserve_rows_1 take for calls, one after
// the other in one transaction and one round trip, and keep the reservations. Outside a transaction the callers wait
// for the answer from when it is sent on, so that what they reserved is known. It returns the calls that were sent.
func (s *Session) reserve(ctx context.Context, all []attempt) (sent []attempt, err error) {
	sent = all
	claim := func() bool {
		sent = slices.DeleteFunc(all, func(a attempt) bool { return !a.Claim() })
		return len(sent) > 0
	}
	err = s.once(ctx, claim, func(ctx context.Context, conn Conn) error {
		if len(sent) == 1 {
			a := &sent[0]
			first := s.placeAwaited(a.Asks, true)
			text, parameters, err := s.questionOf(a, first)
			if err != nil {
				return err
			}
			rows, err := conn.Query(ctx, text, parameters...)
			if err == nil {
				err = s.receiveReserved(ctx, rows, a)
			}
			return generalError(asChanged(err), a.Asks, first)
		}
		batch := &pgx.Batch{}
		for i := range sent {
			text, parameters, err := s.questionOf(&sent[i], new(int32(0)))
			if err != nil {
				return err
			}
			batch.Queue(text, parameters...)
		}
		return SendOn(ctx, conn, batch, func(results pgx.BatchResults) error {
			for i := range sent {
				rows, err := results.Query()
				if err == nil {
					err = s.receiveReserved(ctx, rows, &sent[i])
				}
				if err != nil {
					return err
				}
			}
			return nil
		})
	})
	return sent, err
}

// questionOf returns the statement for a call, and its parameters.
func (s *Session) questionOf(a *attempt, first *int32) (text string, parameters []any, err error) {
	if a.row.ID == "" {
		a.row = a.Reserve.Row()
	}
	if a.inquiry == nil {
		return s.statements.reserve, s.reserveParameters(a.Call, &a.row), nil
	}
	elements, asOf := a.inquiry.next(s)
	a.elements = elements
	kept, err := keptText(elements, a.Asks, &a.row)
	return s.statements.reserveRows, s.keepParameters(kept, asOf, first, &a.row), err
}

// receiveReserved reads the answer for a call.
func (s *Session) receiveReserved(ctx context.Context, rows pgx.Rows, a *attempt) (err error) {
	var decided bool
	if a.elements == nil {
		decided, err = a.scan(rows)
	} else {
		a.Answers, decided, a.ready, err = s.scanGeneral(ctx, rows, a.elements)
	}
	a.verdict, a.Record = undecided, nil
	switch {
	case err != nil:
		if errors.As(err, &a.held) { // the other calls may go on
			return nil
		}
	case decided && !bucket.AllAllowed(a.Answers):
		a.verdict = refused
	case decided:
		if a.verdict = allowed; a.Reserve != nil {
			a.Record = a.Reserve.Made(a.row, a.ready)
		}
	}
	return err
}

// scan reads the answer of reserve_1.
func (a *attempt) scan(rows pgx.Rows) (decided bool, err error) {
	defer rows.Close()
	if !rows.Next() {
		return false, cmp.Or(rows.Err(), errNoAnswer)
	}
	var is struct { // one allocation
		allowed         pgtype.Bool
		value, capacity pgtype.Float8
		ts, ready       pgtype.Int8
		now             int64
	}
	if err := rows.Scan(&is.allowed, &is.value, &is.ts, &is.capacity, &is.now, &is.ready); err != nil {
		return false, err
	}
	rows.Close() // or there is no Err yet
	a.ready = is.ready.Int64
	a.Answers = append(a.one[:0], bucket.Answer{
		Allowed: is.allowed.Bool, Absent: !is.ts.Valid, Now: is.now,
		State: bucket.State{Value: is.value.Float64, TS: is.ts.Int64, Capacity: is.capacity.Float64},
	})
	return is.allowed.Valid, rows.Err()
}

// reserveOne has reserve decide on a call, and asks again while that leaves it undecided.
func (s *Session) reserveOne(ctx context.Context, a attempt) (ready int64, err error) {
	c, one := a.Call, []attempt{a}
	s.enterQueue(ctx, c.Asks)
	for range mostRounds {
		_, err := s.reserve(ctx, one)
		switch {
		case err != nil:
			return 0, err
		case c.held != nil:
			return 0, c.held
		case c.verdict != undecided:
			return one[0].ready, nil
		case c.inquiry == nil:
			c.inquiry = newInquiry(takesOf(c.Asks), c.Answers)
		default:
			c.inquiry.found = c.Answers
		}
	}
	return 0, errUndecided
}

// reserveAlone has reserve decide on a call by itself. If another transaction is in the way for long, it needs one in
// which it can wait, and which can be rolled back: its caller may still leave.
func (s *Session) reserveAlone(ctx context.Context, c *Call) error {
	err := ErrNeedsTx
	if c.held = nil; s.mode != alone || s.waits == 0 {
		err = s.retry(ctx, c.Verb, func() error {
			_, err := s.reserveOne(ctx, s.attempt(c))
			return err
		})
	}
	switch {
	case err == nil || c.held != nil || s.mode != alone || !errors.Is(err, ErrNeedsTx) && !hasTimedOut(err):
		return err
	case c.passes && !errors.Is(err, ErrNeedsTx) && len(c.Asks) == 1:
		return &heldError{c.Asks[0].Key, err}
	}
	return s.RetryTx(ctx, c.Verb, func(tx *Session) error { return tx.Decide(ctx, c) })
}

// reserveAll has reserve decide on the calls of a batch together, and then on those that this leaves undecided, or all
// if it has failed, each by itself. It returns those that need a row which another transaction holds.
func (s *Session) reserveAll(ctx context.Context, calls []*Call, waitFor *bucket.Key) (waiting []blocked) {
	all := make([]attempt, len(calls))
	for i, c := range calls {
		all[i] = s.attempt(c)
	}
	slices.SortStableFunc(all, func(a, b attempt) int { return a.Asks[0].Key.Compare(b.Asks[0].Key) })
	began := time.Now()
	sent, err := s.reserve(ctx, all)
	var refusal *pgconn.PgError
	switch {
	case err == nil:
		s.owner.Batched(ctx, len(sent), time.Since(began))
		calls = nil
		for i := range sent {
			if c := sent[i].Call; c.verdict == undecided {
				calls = append(calls, c)
			} else {
				c.Answer(nil)
			}
		}
		slices.SortFunc(calls, func(a, b *Call) int { return a.seq - b.seq })
	case errors.Is(err, ErrNeedsTx), errors.As(err, &refusal) && refusal.SeverityUnlocalized == "ERROR":
		// nothing was reserved
	default:
		for _, c := range calls {
			c.Answer(err)
		}
		return nil
	}
	for _, c := range calls {
		c.passes = waitFor == nil
		waiting = append(waiting, s.runAlone(ctx, c, waitFor)...)
		c.passes = false
	}
	return waiting
}

// ReserveAgain has reserve_rows_1 take again for a reservation that is known, as the row says. The answers say whether
// it has.
func (s *Session) ReserveAgain(ctx context.Context, asks []bucket.Ask,
	row *Row,
) (answers []bucket.Answer, ready int64, err error) {
	c := Call{Question: Question{Asks: asks}}
	c.inquiry = newInquiry(takesOf(asks), nil)
	ready, err = s.reserveOne(ctx, attempt{Call: &c, row: *row})
	return c.Answers, ready, err
}

// ErrNeedsTx is the error for what no statement can do alone. It needs a transaction.
var ErrNeedsTx = errors.New("the call needs a transaction")

func (u *Unit) reserveParameters(c *Call, row *Row) []any {
	a := &c.Asks[0]
	t := &a.Terms
	since, until := spanOf(t)
	return []any{
		row.ID, a.Key.Name, a.Key.Key, a.Key.Shard, a.Cost, t.Capacity, t.Rate, t.Steps, t.Step, t.Phase, a.MinBalance, since,
		until, u.AsOf(), u.mode == alone,
		row.plan(0), calendarOf(t), row.NotBeforeUs, row.StaleUs, row.ExpireUs, row.Release, !a.Unenforced,
	}
}

func (s *Session) keepParameters(elements string, asOf *int64, first *int32, row *Row) []any {
	known := row.Known
	if known == nil {
		known = &Known{}
	}
	var state *string
	if known.State != "" {
		state = &known.State
	}
	return []any{
		elements, asOf, first, int32(s.waitForOthers().Milliseconds()), s.mode == alone,
		row.ID, row.NotBeforeUs, row.StaleUs, row.ExpireUs, row.Release,
		state, known.ReadyUs, known.StartedUs, known.ExpiresUs, row.Starts,
	}
}

// keptText returns p_asks of reserve_rows_1: the elements of asks, with what is kept of each bucket.
func keptText(elements []rowAsk, asks []bucket.Ask, row *Row) (string, error) {
	for i := range elements {
		a := &asks[i]
		kept := &keptColumns{Plan: row.plan(i), Calendar: calendarOf(&a.Terms), Waits: !a.Unenforced}
		if a.Terms.Windows != nil {
			kept.NextUs = a.Terms.NextWindows()
		}
		elements[i].keptColumns = kept
	}
	text, err := json.Marshal(elements)
	return string(text), err
}
