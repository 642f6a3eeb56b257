package store

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// run is Run for some of the calls of a batch, after choose.
func (s *Session) run(ctx context.Context, calls []*Call, waitFor *bucket.Key) (waiting []blocked) {
	p := planOf(calls)
	if waitFor != nil && !p.isOfOneRow() {
		p = &plan{others: calls}
	}
	attempt := func() error { return s.spend(ctx, p) }
	if waitFor != nil && len(p.groups) > 0 {
		attempt = func() error { return s.spendOne(ctx, p.groups[0]) }
	}
	began := time.Now()
	err := attempt()
	if waitFor == nil && len(p.groups) > 0 && wasOvertaken(err) { // nothing was taken
		for _, c := range calls {
			c.way = byLooking
		}
		return s.run(ctx, calls, nil)
	}
	if err != nil {
		err = s.owner.Retry(ctx, calls[0].Verb, err, attempt)
	}
	if err != nil {
		return runHalves(calls, err, waitFor, func(calls []*Call) []blocked { return s.run(ctx, calls, waitFor) })
	}
	if len(calls) > 1 {
		s.owner.Batched(ctx, len(calls), time.Since(began))
	}
	undecided := p.answer()
	if p.hidden != nil {
		for _, c := range p.others {
			c.Answer(p.hidden)
		}
		p.others = nil
	}
	others := slices.Concat(undecided, p.others)
	slices.SortFunc(others, bySeq)
	open := answerRefused(others)
	if len(open) == 0 {
		return nil
	}
	return s.decideOpen(ctx, open, waitFor)
}

// runHalves runs calls whose statement failed with err again in two halves, when one of them may be to blame for it. It answers the
// calls with err when they all are, as they ask for one bucket, or have waited for one row until a timeout of the session.
func runHalves(calls []*Call, err error, waitFor *bucket.Key, runBatch func(calls []*Call) []blocked) []blocked {
	if len(calls) == 1 || askForOne(calls) || !isOfOne(err) || waitFor != nil && HasTimedOut(err) && !waitedTooLong(err) {
		for _, c := range calls {
			c.Answer(err)
		}
		return nil
	}
	half := len(calls) / 2
	return append(runBatch(calls[:half]), runBatch(calls[half:])...)
}

// askForOne reports whether the calls ask for the same bucket and for no other.
func askForOne(calls []*Call) bool {
	first := calls[0].Asks[0].Key
	return !slices.ContainsFunc(calls, func(c *Call) bool { return len(c.Asks) > 1 || c.Asks[0].Key != first })
}

// answerRefused answers the calls for which a look is enough, and returns the others.
func answerRefused(calls []*Call) (open []*Call) {
	locked := make(map[bucket.Key]bool) // buckets that are going to be locked
	for _, c := range calls {
		switch {
		case c.Look:
			c.Answer(nil)
		case c.Reserve == nil && !c.asksAllOf(locked) && c.isRefused():
			c.Answer(nil)
		default:
			open = append(open, c)
			for j := range c.Asks {
				locked[c.Asks[j].Key] = true
			}
		}
	}
	return open
}

// asksAllOf reports whether all buckets of the call will be locked by earlier calls. Then deciding on it in its turn, after their
// takes, costs nothing.
func (c *Call) asksAllOf(locked map[bucket.Key]bool) bool {
	return !slices.ContainsFunc(c.Asks, func(a bucket.Ask) bool { return !locked[a.Key] })
}

// isRefused reports whether a look at the call's buckets is enough to refuse it. It is not if a wrong clock must be corrected.
func (c *Call) isRefused() bool {
	for i := range c.Asks {
		if c.Asks[i].FromFuture(c.Answers[i]) {
			return false
		}
	}
	return !bucket.AllAllowed(c.Answers)
}

// bySeq orders calls by their arrival.
func bySeq(a, b *Call) int { return a.seq - b.seq }

// decideOpen answers calls one after the other on locked rows, in a transaction of its own. It returns the calls that
// need a row which another transaction holds.
func (s *Session) decideOpen(ctx context.Context, calls []*Call, waitFor *bucket.Key) (again []blocked) {
	waits := 0
	for _, c := range calls {
		waits = max(waits, c.waits)
	}
	first := s.waitingFor(waitFor, waits)
	var waiting []blocked
	err := first.RetryTx(ctx, calls[0].Verb, func(tx *Session) (err error) {
		waiting, err = tx.decideLocked(ctx, calls)
		return err
	})
	var held *heldError
	switch {
	case (len(calls) == 1 || askForOne(calls)) && errors.As(err, &held):
		for _, c := range calls {
			again = append(again, c.blockedBy(held.row))
		}
		return again
	case err != nil:
		return runHalves(calls, err, waitFor, func(calls []*Call) []blocked { return s.decideOpen(ctx, calls, waitFor) })
	}
	next := 0
	for _, c := range calls {
		if next < len(waiting) && waiting[next].Call == &c.Call {
			next++
			continue
		}
		c.Answer(nil)
	}
	return waiting
}
