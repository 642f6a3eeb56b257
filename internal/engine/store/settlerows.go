package store

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/pgerr"
)

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

// asChanged returns ErrChanged for an error that says so.
func asChanged(err error) error {
	if pgerr.Code(err) == codeChanged {
		return ErrChanged
	}
	return err
}

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
	return errors.Is(err, ErrNeedsTx) || HasTimedOut(err) || IsRetryable(err) || errors.As(err, &held)
}
