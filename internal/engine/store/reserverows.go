package store

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// keeps reports whether reserve_rows_1 decides on c, if reserve_1 doesn't.
func (s *Session) keeps(c *Call) bool {
	return c.Reserve != nil && !c.Look && s.memory == nil
}

// wayToKeep returns the way of a call that keeps a record. While it waits for a row that another transaction holds, its
// caller may still leave, so it needs a transaction that can be rolled back.
func (s *Session) wayToKeep(c *Call) way {
	switch {
	case s.mode == alone && s.waits > 0:
		return inOwnTx
	case s.reserves(c):
		return byStatement
	}
	return inGeneral
}

// reserveInGeneral has reserve_rows_1 take from the buckets of a call, and keep the record of that.
func (s *Session) reserveInGeneral(ctx context.Context, c *Call) error {
	found, row := c.Answers, c.Reserve.Row()
	var ready int64
	err := s.retry(ctx, c.Verb, func() (err error) {
		c.Answers, ready, err = s.reserveRows(ctx, c.Asks, &row, c.Claim, found)
		return err
	})
	switch {
	case s.mode == alone && (errors.Is(err, ErrNeedsTx) || HasTimedOut(err)):
		return s.RetryTx(ctx, c.Verb, func(tx *Session) error { return tx.Decide(ctx, c) })
	case err == nil && bucket.AllAllowed(c.Answers):
		c.Record = c.Reserve.Made(row, ready)
	}
	return err
}

// ReserveAgain has reserve_rows_1 take again for a reservation that is known, as the row says. The answers say whether
// it has.
func (s *Session) ReserveAgain(ctx context.Context, asks []bucket.Ask,
	row *Row,
) (answers []bucket.Answer, ready int64, err error) {
	return s.reserveRows(ctx, asks, row, nil, nil)
}

// ErrNeedsTx is the error for what no statement can do alone. It needs a transaction.
var ErrNeedsTx = errors.New("the call needs a transaction")

// reserveRows has reserve_rows_1 decide on asks. ready is when the work may run, if all are allowed. Outside a
// transaction, as in reserve, its caller waits for the answer.
func (s *Session) reserveRows(ctx context.Context, asks []bucket.Ask, row *Row, claim func() bool,
	found []bucket.Answer,
) (answers []bucket.Answer, ready int64, err error) {
	answers, err = s.decideBy(ctx, takesOf(asks), found,
		func(ctx context.Context, _ []bucket.Ask, elements []rowAsk,
			asOf *int64,
		) (answers []bucket.Answer, decided bool, err error) {
			text, err := keptText(elements, asks, row)
			if err != nil {
				return nil, false, err
			}
			first := s.placeAwaited(asks, true)
			err = s.once(ctx, claim, func(ctx context.Context, conn Conn) error {
				rows, err := conn.Query(ctx, s.statements.reserveRows, s.keepParameters(text, asOf, first, row)...)
				if err == nil {
					answers, decided, ready, err = s.scanGeneral(ctx, rows, elements)
				}
				return err
			})
			return answers, decided, generalError(asChanged(err), asks, first)
		})
	return answers, ready, err
}

// keepParameters returns the parameters of reserve_rows_1.
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
