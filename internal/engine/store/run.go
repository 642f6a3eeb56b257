package store

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// mostBatches bounds how often statements for several calls are tried, before decide_rows_1 decides on them in turn.
const mostBatches = 3

// run is a round of Run for some of the calls of a batch, after choose.
func (s *Session) run(ctx context.Context, calls []*Call, waitFor *bucket.Key, round int) (waiting []blocked) {
	p := planOf(calls)
	attempt := func() error { return s.spend(ctx, p, waitFor) }
	isOfOneRow := waitFor != nil && p.isOfOneRow()
	if isOfOneRow {
		attempt = func() error { return s.spendOne(ctx, p.groups[0]) }
	}
	began := time.Now()
	err := attempt()
	if waited := (*WaitError)(nil); !isOfOneRow && len(p.groups) > 0 && wasOvertaken(err) && !errors.As(err, &waited) {
		return s.runFree(ctx, calls, waitFor, round)
	}
	if err != nil {
		err = s.owner.Retry(ctx, calls[0].Verb, err, attempt)
	}
	if err != nil {
		return runHalves(calls, err, waitFor, func(calls []*Call) []blocked { return s.run(ctx, calls, waitFor, round) })
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
	var open []*Call
	for _, c := range answerRefused(others) {
		if c.heldBy != nil {
			waiting = append(waiting, c.blockedBy(*c.heldBy))
		} else {
			open = append(open, c)
		}
	}
	switch {
	case len(open) == 0:
		return waiting
	case round < mostBatches && setTurns(open):
		return append(waiting, s.run(ctx, open, waitFor, round+1)...)
	}
	return append(waiting, s.decideInTurn(ctx, open, waitFor)...)
}

// runFree is the next round of calls of which a statement took nothing, because other transactions hold rows or were
// quicker. For calls that need a held row it only looks, because a refusal waits for no row. Calls that have waited for
// many rows take what they can get.
func (s *Session) runFree(ctx context.Context, calls []*Call, waitFor *bucket.Key, round int) (waiting []blocked) {
	if round >= mostBatches || mostWaits(calls) >= manyWaits {
		return s.decideInTurn(ctx, calls, waitFor)
	}
	var asks []bucket.Ask
	for _, c := range calls {
		asks = append(asks, c.Asks...)
	}
	held, err := s.heldAmong(ctx, bucket.NewLedger(asks).Rows)
	if err != nil {
		return runHalves(calls, err, waitFor, func(calls []*Call) []blocked { return s.runFree(ctx, calls, waitFor, round) })
	}
	if waitFor != nil { // the next round waits for it
		delete(held, *waitFor)
	}
	for _, c := range calls {
		if i := slices.IndexFunc(c.Asks, func(a bucket.Ask) bool { return held[a.Key] }); i >= 0 {
			c.way, c.heldBy = inGeneral, &c.Asks[i].Key
		}
	}
	return s.run(ctx, calls, waitFor, round+1)
}

func (s *Session) heldAmong(ctx context.Context, rows []bucket.Ask) (held map[bucket.Key]bool, err error) {
	names, keys, shards := keysOf(rows)
	found, err := s.conn.Query(ctx, s.statements.held, names, keys, shards)
	if err != nil {
		return nil, err
	}
	held = make(map[bucket.Key]bool)
	var place int64
	_, err = pgx.ForEachRow(found, []any{&place}, func() error {
		held[rows[place-1].Key] = true
		return nil
	})
	return held, err
}

func mostWaits(calls []*Call) (most int) {
	for _, c := range calls {
		most = max(most, c.waits)
	}
	return most
}

// spend takes for the groups of a plan, and reads what the others ask for, in one round trip, and waits for a row
// before that. If one statement fails, nothing is taken.
func (s *Session) spend(ctx context.Context, p *plan, waitFor *bucket.Key) error {
	batch := &pgx.Batch{}
	if waitFor != nil {
		batch.Queue(s.statements.lock, waitFor.Name, waitFor.Key, waitFor.Shard)
	}
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
		if waitFor != nil {
			if _, err := results.Exec(); err != nil {
				return waitedFor(err, *waitFor)
			}
		}
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
	var p bucket.Ledger
	for _, c := range calls {
		n := len(c.Asks)
		c.Answers, answers = p.LookAt(c.Asks, answers[:n], c.one[:0]), answers[n:]
	}
	return filtered, nil
}

// runHalves runs calls whose statement failed with err again in two halves, when one of them may be to blame for it. It
// answers the calls with err when they all are, as they ask for one bucket, or have waited for one row until a timeout
// of the session.
func runHalves(calls []*Call, err error, waitFor *bucket.Key, runBatch func(calls []*Call) []blocked) []blocked {
	if len(calls) == 1 || askForOne(calls) || !isOfOne(err) || waitFor != nil && hasTimedOut(err) {
		for _, c := range calls {
			c.Answer(err)
		}
		return nil
	}
	half := len(calls) / 2
	return append(runBatch(calls[:half]), runBatch(calls[half:])...)
}

func askForOne(calls []*Call) bool {
	first := calls[0].Asks[0].Key
	return !slices.ContainsFunc(calls, func(c *Call) bool { return len(c.Asks) > 1 || c.Asks[0].Key != first })
}

// answerRefused answers the calls for which a look is enough, and returns the others. A call whose buckets earlier
// calls take from is decided in its turn, which costs nothing.
func answerRefused(calls []*Call) (open []*Call) {
	taken := make(map[bucket.Key]bool)
	for _, c := range calls {
		isInTurn := c.isKnown() && !slices.ContainsFunc(c.Asks, func(a bucket.Ask) bool { return !taken[a.Key] })
		if c.Look || !isInTurn && c.isRefused() {
			c.Answer(nil)
			continue
		}
		open = append(open, c)
		for i := range c.Asks {
			taken[c.Asks[i].Key] = taken[c.Asks[i].Key] || c.isKnown()
		}
	}
	return open
}

// isRefused reports whether a look at the call's buckets is enough to refuse it. It is not if a wrong clock must be
// corrected.
func (c *Call) isRefused() bool {
	for i := range c.Asks {
		if c.Asks[i].FromFuture(c.Answers[i]) {
			return false
		}
	}
	return !bucket.AllAllowed(c.Answers)
}

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
		c.inquiry, c.held = newInquiry(c.wanted(), nil), nil
	}
	open := calls
	for range mostRounds {
		attempt := func() error { return s.askInTurn(ctx, open) }
		began := time.Now()
		err := attempt()
		if err != nil {
			err = s.owner.Retry(ctx, open[0].Verb, err, attempt)
		}
		if err != nil {
			return append(waiting, runHalves(open, err, s.waitFor,
				func(calls []*Call) []blocked { return s.decideSome(ctx, calls) })...)
		}
		if len(open) > 1 {
			s.owner.Batched(ctx, len(open), time.Since(began))
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
