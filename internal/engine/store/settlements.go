package store

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/pgerr"
)

// Settlement has settle_1 end a reservation of one bucket, or settle_costs_1 one of several.
type Settlement struct {
	ID, Final string
	Bucket    *bucket.Key   // that the caller means, or the first of several; nil: whichever it is
	Cost      *float64      // of the work; nil: what was reserved
	Free      bool          // whether it may not cost more than was reserved
	Own       bool          // whether the terms of the reservation decide
	Terms     *bucket.Terms // the terms of now, if Own is false; nil: unknown

	Several bool         // whether it's of several buckets
	Others  []bucket.Key // after Bucket
	Costs   []ActualCost // in place of the fields above, for those whose costs differ

	Ended Ended // the answer
}

// ActualCost is what Settlement has of one bucket.
type ActualCost struct {
	Key       bucket.Key
	Cost      float64
	Free, Own bool
	Terms     *bucket.Terms
}

// Compare returns the order in which settlements of known buckets lock their rows.
func (q *Settlement) Compare(other *Settlement) int {
	return cmp.Or(q.Bucket.Compare(*other.Bucket), cmp.Compare(q.ID, other.ID))
}

// Ended is the answer to a Settlement.
type Ended struct {
	Done   bool    // whether it's decided; if not, nothing has changed
	State  string  // before the call; "": there is no such reservation
	Amount float64 // that was charged, if the call has ended it
	Key    bucket.Key
	Plan   string
	Others []Charged // of the buckets behind the first, if the call has ended it
}

// Charged is an amount that was charged to a bucket.
type Charged struct {
	Key    bucket.Key
	Amount float64
}

// Settles reports whether Settle can decide by statement under the terms of a settlement.
func (s *Session) Settles(q *Settlement) bool {
	isFit := func(t *bucket.Terms) bool {
		return t == nil || (t.Windows == nil || t.Revisions == nil) && (t.Kind.Statement() == bucket.StepStatement ||
			q.Several && t.Kind.Statement() == bucket.WindowStatement)
	}
	if q.Several {
		return s.KeepsInSQL() && !slices.ContainsFunc(q.Costs, func(c ActualCost) bool { return !isFit(c.Terms) })
	}
	return s.memory == nil && isFit(q.Terms)
}

// Settle ends reservations by settle_1. Outside a transaction it doesn't wait for other transactions for long: then a
// call is not done.
func (s *Session) Settle(ctx context.Context, of ...*Settlement) error {
	return s.OrSpoil(ctx, s.settle(ctx, nil, &of))
}

// settle is Settle for the settlements that claim leaves in of.
func (s *Session) settle(ctx context.Context, claim func() bool, of *[]*Settlement) error {
	err := s.once(ctx, claim, func(ctx context.Context, conn Conn) error { return s.settleOn(ctx, conn, *of...) })
	if s.mode == alone && (IsInTheWay(err) || len(*of) > 1 && isOfOne(err)) {
		for _, q := range *of {
			q.Ended = Ended{}
		}
		err = nil
	}
	return err
}

// MostEnds bounds the calls of a transaction that ends reservations. settle_costs_1 has two subtransactions, and a
// server finds up to 64 of a transaction quickly.
const MostEnds = 30

// settleFirst answers the calls that end reservations, and returns the others.
func (s *Session) settleFirst(ctx context.Context, calls []*Call) (others []*Call) {
	isEnd := func(c *Call) bool { return c.Settlement != nil }
	if !slices.ContainsFunc(calls, isEnd) {
		return calls
	}
	ends, others := split(calls, isEnd)
	slices.SortFunc(ends, func(a, b *Call) int { return a.Settlement.Compare(b.Settlement) })
	for part := range slices.Chunk(ends, MostEnds) {
		s.settleAll(ctx, part)
	}
	return others
}

// settleAll ends reservations in one transaction and one round trip.
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
	err := s.settle(ctx, claim, &of)
	if len(of) > 1 && err == nil {
		s.owner.Batched(ctx, len(of), time.Since(began))
	}
	for _, c := range calls {
		c.Answer(err)
	}
}

// settleOn sends settle_1 or settle_costs_1 to a connection for each settlement.
func (u *Unit) settleOn(ctx context.Context, conn Conn, of ...*Settlement) error {
	batch := &pgx.Batch{}
	var wait *int32
	if u.mode == alone {
		wait = new(int32(settleWait(of).Milliseconds()))
	}
	for _, q := range of {
		q.Ended = Ended{}
		if !q.Several {
			batch.Queue(u.statements.settle, u.settleParameters(q, wait)...)
			continue
		}
		costs, err := q.costsText()
		if err != nil {
			return err
		}
		batch.Queue(u.statements.settleCosts, q.ID, q.Final, costs, u.AsOf(), wait)
	}
	return SendOn(ctx, conn, batch, func(results pgx.BatchResults) error {
		for _, q := range of {
			scan := q.Ended.scan
			if q.Several {
				scan = q.Ended.scanSeveral
			}
			if err := scan(results.QueryRow()); err != nil {
				return err
			}
		}
		return nil
	})
}

// scan reads the answer of settle_1.
func (e *Ended) scan(row pgx.Row) error {
	var state, name, key, plan pgtype.Text
	var amount pgtype.Float8
	var shard pgtype.Int4
	err := row.Scan(&e.Done, &state, &amount, &name, &key, &shard, &plan)
	e.State, e.Amount, e.Key, e.Plan = state.String, amount.Float64,
		bucket.Key{Name: name.String, Key: key.String, Shard: shard.Int32}, plan.String
	return err
}

// scanSeveral reads the answer of settle_costs_1.
func (e *Ended) scanSeveral(row pgx.Row) error {
	var state pgtype.Text
	var names, keys []string
	var amounts []float64
	err := row.Scan(&e.Done, &state, &names, &keys, &amounts)
	if e.State = state.String; err != nil || !e.Done {
		return err
	}
	for i, amount := range amounts {
		key := bucket.Key{Name: names[i], Key: keys[i]}
		if i == 0 {
			e.Key, e.Amount = key, amount
			continue
		}
		e.Others = append(e.Others, Charged{key, amount})
	}
	return nil
}

// settleWait returns how long each settlement waits for a row that another transaction holds.
func settleWait(of []*Settlement) time.Duration {
	first := of[0].Bucket
	for _, q := range of[1:] {
		if first == nil || q.Bucket == nil || *q.Bucket != *first || q.Several || of[0].Several {
			return shortWait // the others may hold other rows
		}
	}
	return OnceWait
}

func (u *Unit) settleParameters(q *Settlement, wait *int32) []any {
	var name, key *string
	if q.Bucket != nil {
		name, key = &q.Bucket.Name, &q.Bucket.Key
	}
	var capacity, rate, steps *float64
	var step, phase, since, until, reset *int64
	if t := q.Terms; t != nil {
		capacity, rate, steps, step, phase = &t.Capacity, &t.Rate, &t.Steps, &t.Step, &t.Phase
		since, until = spanOf(t)
		if t.Revisions != nil {
			reset = new(t.LastReset())
		}
	}
	return []any{
		q.ID, q.Final, name, key, q.Cost, !q.Free, q.Own, capacity, rate, steps, step, phase,
		since, until, reset, q.Terms != nil && q.Terms.Windows != nil, u.AsOf(), wait,
	}
}

func (q *Settlement) costsText() (string, error) {
	type element struct {
		Name string  `json:"name"`
		Key  string  `json:"key"`
		Cost float64 `json:"cost"`
		Free bool    `json:"free"`
		Own  bool    `json:"own"`
		*policyColumns
		SinceUs *int64 `json:"since_us,omitempty"`
		LastUs  *int64 `json:"last_us,omitempty"`
		ResetUs *int64 `json:"reset_us,omitempty"`
		Windows bool   `json:"windows"`
	}
	elements := make([]element, len(q.Costs))
	for i := range q.Costs {
		c, e := &q.Costs[i], &elements[i]
		*e = element{Name: c.Key.Name, Key: c.Key.Key, Cost: c.Cost, Free: c.Free, Own: c.Own}
		if t := c.Terms; t != nil {
			e.policyColumns = policyOf(t)
			e.SinceUs, e.LastUs = spanOf(t)
			if e.Windows = t.Windows != nil; t.Revisions != nil {
				e.ResetUs = new(t.LastReset())
			}
		}
	}
	text, err := json.Marshal(elements)
	return string(text), err
}

// End is the end of an open reservation, for settle_rows_1. The first fields are of the reservation as it was read.
type End struct {
	ID      string          `json:"id"`
	ReadyUs int64           `json:"ready_us"`
	PaidUs  int64           `json:"paid_us"`
	Owed    float64         `json:"owed"`
	Others  json.RawMessage `json:"others"` // nil: there is one bucket

	State   string          `json:"state"`
	Settled *float64        `json:"settled"`
	Rest    json.RawMessage `json:"rest"` // others from then on
	NowUs   int64           `json:"now_us"`
}

// ErrChanged is returned for a reservation that is not as its caller has read it. Nothing was done.
var ErrChanged = errors.New("another call has changed the reservation")

// codeChanged is the SQLSTATE of functions for that.
const codeChanged = "RL004"

func asChanged(err error) error {
	if pgerr.Code(err) == codeChanged {
		return ErrChanged
	}
	return err
}

// IsInMemory reports whether Go decides, on rows in memory.
func (s *Session) IsInMemory() bool { return s.memory != nil }

// KeepsInSQL reports whether functions in the server change reservations.
func (s *Session) KeepsInSQL() bool { return s.memory == nil && !s.IsRouted() }

// EndRows ends reservations by settle_rows_1, and makes the charges. Outside a transaction it isn't cancelled, and
// doesn't wait for other transactions for long: see IsInTheWay.
func (s *Session) EndRows(ctx context.Context, ends []End, charges ...Charge) error {
	text, err := json.Marshal(ends)
	if err != nil {
		return err
	}
	send := func(ctx context.Context, elements []rowAsk, asOf *int64, first *int32) (answers []bucket.Answer, decided bool,
		err error,
	) {
		var asks pgtype.Text
		if len(elements) > 0 {
			encoded, err := json.Marshal(elements)
			if err != nil {
				return nil, false, err
			}
			asks = pgtype.Text{String: string(encoded), Valid: true}
		}
		err = s.once(ctx, nil, func(ctx context.Context, conn Conn) error {
			rows, err := conn.Query(ctx, s.statements.settleRows, string(text), asks, asOf, first,
				int32(s.waitForOthers().Milliseconds()), s.mode == alone)
			if err == nil {
				answers, decided, _, err = s.scanGeneral(ctx, rows, elements)
			}
			return err
		})
		return answers, decided, asChanged(err)
	}
	changes := changesOf(charges)
	if len(changes) == 0 {
		_, _, err := send(ctx, nil, s.AsOf(), nil)
		return err
	}
	_, err = s.decideBy(ctx, inOrder(changes), nil,
		func(ctx context.Context, asks []bucket.Ask, elements []rowAsk, asOf *int64) ([]bucket.Answer, bool, error) {
			first := s.placeAwaited(asks, false)
			answers, decided, err := send(ctx, elements, asOf, first)
			return answers, decided, generalError(err, asks, first)
		})
	return err
}

// OnceWait is how long a statement of Once may wait for a row: its caller waits for it, also if its context ends.
const OnceWait = 50 * time.Millisecond

// Once runs a statement: in the transaction of the session, or else in one of its own that is not cancelled.
func (s *Session) Once(ctx context.Context, statement func(ctx context.Context, conn Conn) error) error {
	return s.once(ctx, nil, statement)
}

// once is Once for a call that is claimed first.
func (s *Session) once(ctx context.Context, claim func() bool,
	statement func(ctx context.Context, conn Conn) error,
) error {
	if s.mode != alone {
		return statement(ctx, s.conn)
	}
	var held *heldError // which is an answer, after which nothing was done
	ran, err := s.owner.Once(ctx, claim, func(ctx context.Context, conn Conn) error {
		if err := statement(ctx, conn); !errors.As(err, &held) {
			return err
		}
		return nil
	})
	switch {
	case held != nil:
		return held
	case !ran && err == nil:
		return ErrNeedsTx
	}
	return err
}

// IsInTheWay reports whether a call outside a transaction has failed because it needs one in which it can wait, or be
// cancelled: nothing was done.
func IsInTheWay(err error) bool {
	var held *heldError
	return errors.Is(err, ErrNeedsTx) || hasTimedOut(err) || wasOvertaken(err) || errors.As(err, &held)
}
