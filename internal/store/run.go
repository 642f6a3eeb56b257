package store

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

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
	slices.SortFunc(others, func(a, b *Call) int { return a.seq - b.seq })
	open := answerRefused(others)
	if slices.ContainsFunc(open, s.keeps) {
		return s.decideEach(ctx, open, waitFor)
	}
	if len(open) == 0 {
		return nil
	}
	return s.decideOpen(ctx, open, waitFor)
}

// spend takes for the groups of a plan, and reads what the others ask for, in one round trip. If one statement fails, nothing is taken.
func (s *Session) spend(ctx context.Context, p *plan) error {
	batch := &pgx.Batch{}
	for _, rows := range p.policies {
		s.queueSpend(batch, rows)
	}
	several := make([]bucket.Ask, len(p.several))
	groups := make(array[integer], len(p.several))
	for i, r := range p.several {
		several[i], groups[i] = r.ask, integer(r.group.number)
	}
	if len(several) > 0 {
		batch.Queue(s.statements.decideGroups, s.groupParameters(several, groups)...)
	}
	var looks []bucket.Ask
	for _, c := range p.others {
		looks = append(looks, c.Asks...)
	}
	if len(looks) > 0 {
		batch.Queue(s.statements.read, s.rowParameters(looks)...)
	}
	filtered := false
	err := s.Send(ctx, batch, func(results pgx.BatchResults) (err error) {
		for _, rows := range p.policies {
			if err := receiveSpend(results, rows); err != nil {
				return err
			}
		}
		if len(several) > 0 {
			found, err := results.Query()
			if err != nil {
				return err
			}
			answers, err := scanGroups(found, several)
			if err != nil {
				return err
			}
			for i, a := range answers {
				p.several[i].found, p.several[i].answer = true, a.Answer
				p.several[i].answer.Allowed = a.given
			}
		}
		if len(looks) > 0 {
			filtered, err = receiveLooks(results, looks, p.others)
		}
		return err
	})
	if err == nil && filtered {
		p.hidden = s.CheckHidden(ctx)
	}
	return err
}

// queueSpend queues spend_1 or spend_windows_1, for rows under one policy.
func (s *Session) queueSpend(batch *pgx.Batch, rows []*row) {
	n := len(rows)
	keys, shards := make(array[text], n), make(array[integer], n)
	costs, phases := make(array[double], n), make(array[bigint], n)
	for i, r := range rows {
		keys[i], shards[i] = text(r.ask.Key.Key), integer(r.ask.Key.Shard)
		costs[i], phases[i] = double(r.ask.Cost), bigint(r.ask.Terms.Phase)
	}
	name, t := rows[0].ask.Key.Name, rows[0].ask.Terms
	since, until := spanOf(&t)
	if bucket.Holds(&t) {
		batch.Queue(s.statements.acquireSet, s.acquireParameters(rows, false)...)
		return
	}
	if t.Kind.Statement() == bucket.WindowStatement {
		batch.Queue(s.statements.spendWindows, name, keys, shards, costs,
			t.Capacity, int32(t.Steps), t.Step, phases, since, until, s.AsOf(), s.relaxed)
		return
	}
	batch.Queue(s.statements.spend, name, keys, shards, costs,
		t.Capacity, t.Rate, t.Steps, t.Step, phases, since, until, s.AsOf(), s.relaxed)
}

// receiveSpend reads the answers of spend_1 or spend_windows_1. The first one for a row counts.
func receiveSpend(results pgx.BatchResults, rows []*row) error {
	found, err := results.Query()
	if err != nil {
		return err
	}
	for _, r := range rows { // of an attempt before
		r.found, r.answer, r.acquired = false, bucket.Answer{}, acquired{}
	}
	if bucket.Holds(&rows[0].ask.Terms) {
		return scanAcquired(found, rows)
	}
	var place int64
	var a bucket.Answer
	var taken []float64
	columns := []any{&place, &a.Allowed, &a.State.Value, &a.State.TS, &a.State.Capacity, &a.Now, &taken}
	_, err = pgx.ForEachRow(found, columns[:len(found.FieldDescriptions())], func() error {
		if place < 1 || place > int64(len(rows)) {
			return errUnasked
		}
		r := rows[place-1]
		if r.found {
			return nil
		}
		r.answer, r.found = a, true
		if taken != nil {
			r.answer.State.Parts = &bucket.Parts{Taken: taken}
		}
		return nil
	})
	return err
}

// errUnasked is the error for an answer about a bucket that was not asked for.
var errUnasked = errors.New("the statement answered for a bucket that was not asked for")

// spendOne takes for a group of calls for one bucket, and waits for its row: it holds no other meanwhile.
func (s *Session) spendOne(ctx context.Context, g *group) error {
	if bucket.Holds(&g.row.ask.Terms) {
		return s.acquireFor(ctx, g.row)
	}
	answers, v, err := s.takeOne(ctx, []bucket.Ask{g.row.ask}, g.calls[0].traits.Statement, nil)
	if g.row.found = err == nil && v != undecided; g.row.found {
		g.row.answer = answers[0]
	}
	return err
}

// receiveLooks gives each call its answers to a look at its rows. filtered is what scanRows returns.
func receiveLooks(results pgx.BatchResults, rows []bucket.Ask, calls []*Call) (filtered bool, err error) {
	found, err := results.Query()
	if err != nil {
		return false, err
	}
	answers, filtered, err := scanRows(found, rows)
	if err == nil {
		err = answeredAll(answers, rows)
	}
	if err != nil {
		return false, err
	}
	var p bucket.Page
	for _, c := range calls {
		n := len(c.Asks)
		c.Answers, answers = p.LookAt(c.Asks, answers[:n], c.one[:0]), answers[n:]
	}
	return filtered, nil
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
