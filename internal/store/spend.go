package store

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/pgerr"
)

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
		r.found = false
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

// decideRows has decide_1 take from one row of each bucket, all or nothing.
func (u *Unit) decideRows(ctx context.Context, rows []bucket.Ask) (answers []bucket.Answer, v verdict, err error) {
	u.EnterQueue(ctx, rows)
	c := columnsOf(rows)
	found, err := u.conn.Query(ctx, u.statements.decide, c.names, c.keys, c.shards, c.costs, c.capacities, c.rates, c.steps, c.stepUs, c.phases,
		c.lowest, c.since, c.until, u.AsOf())
	if err != nil {
		return nil, undecided, err
	}
	answers = make([]bucket.Answer, 0, len(rows))
	var a bucket.Answer
	columns := []any{&a.Allowed, &a.State.Value, &a.State.TS, &a.State.Capacity, &a.Now}
	_, err = pgx.ForEachRow(found, columns, func() error {
		answers = append(answers, a)
		return nil
	})
	switch {
	case err != nil || len(answers) == 0:
		return nil, undecided, err
	case bucket.AllAllowed(answers):
		return answers, allowed, nil
	}
	return answers, refused, nil
}

// groupParameters returns the parameters of decide_groups_1.
func (u *Unit) groupParameters(rows []bucket.Ask, groups array[integer]) []any {
	c := columnsOf(rows)
	return []any{
		groups, c.names, c.keys, c.shards, c.costs, c.capacities, c.rates, c.steps, c.stepUs, c.phases, c.lowest, c.since, c.until, u.AsOf(), u.relaxed,
	}
}

// groupAnswer is the answer of decide_groups_1 for a row: whether the costs of its group were taken. If not, Allowed is whether the row has
// enough, if that is known.
type groupAnswer struct {
	given, known bool
	bucket.Answer
}

// scanGroups reads the answers of decide_groups_1.
func scanGroups(found pgx.Rows, rows []bucket.Ask) ([]groupAnswer, error) {
	answers := make([]groupAnswer, len(rows))
	var is struct { // one allocation
		place, now      int64
		given           bool
		enough          pgtype.Bool
		value, capacity pgtype.Float8
		ts              pgtype.Int8
	}
	tag, err := pgx.ForEachRow(found, []any{&is.place, &is.given, &is.enough, &is.value, &is.ts, &is.capacity, &is.now}, func() error {
		if is.place < 1 || is.place > int64(len(rows)) {
			return errUnasked
		}
		r := &answers[is.place-1]
		r.given, r.known, r.Allowed, r.Absent, r.Now = is.given, is.enough.Valid, is.enough.Bool, !is.ts.Valid, is.now
		if r.State = (bucket.State{Value: is.value.Float64, TS: is.ts.Int64, Capacity: is.capacity.Float64}); r.Absent {
			r.State = rows[is.place-1].Terms.Full(is.now)
		}
		return nil
	})
	if err == nil && tag.RowsAffected() != int64(len(rows)) {
		err = fmt.Errorf("the function answered for %d of %d rows", tag.RowsAffected(), len(rows))
	}
	return answers, err
}

// decideAlone is decideRows in a statement that is its own transaction. It's undecided if another transaction is in the way.
func (u *Unit) decideAlone(ctx context.Context, rows []bucket.Ask) (answers []bucket.Answer, v verdict, err error) {
	found, err := u.conn.Query(ctx, u.statements.decideGroups, u.groupParameters(rows, make(array[integer], len(rows)))...)
	if err != nil {
		return nil, undecided, err
	}
	decided, err := scanGroups(found, rows)
	switch {
	case wasOvertaken(err) || HasTimedOut(err): // which the server also says of a lock_timeout, if it ends as the lock is there
		return nil, undecided, nil
	case err != nil:
		return nil, undecided, err
	}
	v, answers = undecided, make([]bucket.Answer, 0, len(rows))
	for _, r := range decided {
		r.Absent = false
		answers = append(answers, r.Answer)
		switch {
		case r.given:
			v = allowed
		case !r.known:
			return nil, undecided, nil
		case !r.Allowed:
			v = refused
		}
	}
	return answers, v, nil
}

// wasOvertaken reports whether a statement for several rows took nothing because another transaction holds one, or was quicker.
func wasOvertaken(err error) bool {
	return IsLockTimeout(err) || IsRetryable(err) || pgerr.Code(err) == codeUniqueViolation
}
