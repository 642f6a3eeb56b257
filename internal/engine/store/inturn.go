package store

import (
	"context"
	"encoding/json"
	"errors"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// decideInTurn has decide_rows_1 decide on calls of a batch one after the other, so many in a message. It returns those
// that need a row which another transaction holds.
func (s *Session) decideInTurn(ctx context.Context, calls []*Call, waitFor *bucket.Key) (waiting []blocked) {
	s = s.waitingFor(waitFor, mostWaits(calls))
	for some := range slices.Chunk(calls, maxStatements) {
		waiting = append(waiting, s.decideSome(ctx, some)...)
	}
	return waiting
}

// decideSome is decideInTurn for the calls of one message, and of others if a policy begins meanwhile.
func (s *Session) decideSome(ctx context.Context, calls []*Call) (waiting []blocked) {
	for _, c := range calls {
		c.inquiry, c.held = newInquiry(takesOf(c.Asks), nil), nil
	}
	open := calls
	for range mostRounds {
		attempt := func() error { return s.askInTurn(ctx, open) }
		err := attempt()
		if err != nil {
			err = s.owner.Retry(ctx, open[0].Verb, err, attempt)
		}
		if err != nil {
			return append(waiting, runHalves(open, err, s.waitFor,
				func(calls []*Call) []blocked { return s.decideSome(ctx, calls) })...)
		}
		var again []*Call
		for _, c := range open {
			switch {
			case c.held != nil:
				waiting = append(waiting, c.blockedBy(c.held.row))
			case c.verdict == undecided:
				again = append(again, c)
			default:
				c.Answer(nil)
			}
		}
		if open = again; len(open) == 0 {
			return waiting
		}
	}
	for _, c := range open {
		c.Answer(errUndecided)
	}
	return waiting
}

// askInTurn calls decide_rows_1 for each call, in one message and one transaction.
func (s *Session) askInTurn(ctx context.Context, calls []*Call) error {
	relaxed := s.relaxed && !slices.ContainsFunc(calls, func(c *Call) bool { return bucket.AnyHolds(c.Asks) })
	batch, all := &pgx.Batch{}, make([][]rowAsk, len(calls))
	for i, c := range calls {
		elements, asOf := c.inquiry.next(s)
		text, err := json.Marshal(elements)
		if err != nil {
			return err
		}
		first := int32(slices.IndexFunc(c.Asks, func(a bucket.Ask) bool { return s.waitFor != nil && a.Key == *s.waitFor }) +
			1)
		all[i] = elements
		batch.Queue(s.statements.decideRows, s.generalParameters(text, asOf, &first, relaxed)...)
	}
	return s.Send(ctx, batch, func(results pgx.BatchResults) error {
		for i, c := range calls {
			found, err := results.Query()
			if err != nil {
				return err
			}
			answers, decided, _, err := s.scanGeneral(ctx, found, all[i])
			if c.held = nil; err != nil && !errors.As(err, &c.held) {
				if s.waitFor != nil {
					err = waitedFor(err, *s.waitFor)
				}
				return err
			}
			c.inquiry.found = answers
			if c.verdict = undecided; decided {
				c.verdict, c.Answers = allowed, answers
			}
		}
		return nil
	})
}
