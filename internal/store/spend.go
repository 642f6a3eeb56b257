package store

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

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
		batch.Queue(s.statements.spendClusters, s.clusterParameters(several, groups)...)
	}
	var looks []bucket.Ask
	for _, c := range p.others {
		looks = append(looks, bucket.RowsOf(c.Asks)...)
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
			answers, err := scanClusters(found, several)
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

// queueSpend queues buckets_spend.sql for rows under one policy.
func (s *Session) queueSpend(batch *pgx.Batch, rows []*row) {
	n := len(rows)
	keys, shards, costs, phases := make(array[text], n), make(array[integer], n), make(array[double], n), make(array[bigint], n)
	for i, r := range rows {
		keys[i], shards[i] = text(r.ask.Key.Key), integer(r.ask.Key.Shard)
		costs[i], phases[i] = double(r.ask.Cost), bigint(r.ask.Terms.Phase)
	}
	t := rows[0].ask.Terms
	since, until := spanOf(&t)
	batch.Queue(s.statements.spend, rows[0].ask.Key.Name, keys, shards, costs,
		t.Capacity, t.Rate, t.Step, t.Steps, phases, s.AsOf(), tolerance, since, until)
}

// receiveSpend reads the answers of buckets_spend.sql.
func receiveSpend(results pgx.BatchResults, rows []*row) error {
	found, err := results.Query()
	if err != nil {
		return err
	}
	defer found.Close()
	for found.Next() {
		r := readerOf(found)
		place := r.int64()
		a := bucket.Answer{Allowed: r.bool(), State: r.state(), Now: r.int64()}
		switch {
		case r.err != nil:
			return r.err
		case place < 1 || place > int64(len(rows)):
			return errUnasked
		}
		rows[place-1].answer, rows[place-1].found = a, true
	}
	return found.Err()
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
		n := len(bucket.RowsOf(c.Asks))
		c.Answers, answers = p.LookAt(c.Asks, answers[:n], c.one[:0]), answers[n:]
	}
	return filtered, nil
}

// clusterParameters returns the parameters of clusters_spend.sql. For each group of rows it takes all, or nothing.
func (u *Unit) clusterParameters(rows []bucket.Ask, groups array[integer]) []any {
	c := columnsOf(rows)
	return []any{
		c.names, c.keys, c.shards, c.costs, c.capacities, c.rates, c.stepUs, c.steps, c.phases, c.lowest, groups, u.AsOf(), c.tolerances,
		c.since, c.until,
	}
}

// clusterAnswer is the answer of clusters_spend.sql for a row: whether the costs of its group were taken, and whether the row had enough.
type clusterAnswer struct {
	given, enough bool
	bucket.Answer
}

// scanClusters reads the answers of clusters_spend.sql.
func scanClusters(found pgx.Rows, rows []bucket.Ask) ([]clusterAnswer, error) {
	defer found.Close()
	answers := make([]clusterAnswer, 0, len(rows))
	for found.Next() {
		if len(answers) == len(rows) {
			return nil, fmt.Errorf("the statement answered for more than the %d rows that were asked for", len(rows))
		}
		r := readerOf(found)
		a := clusterAnswer{given: r.bool(), enough: r.bool()}
		a.Absent, a.State, a.Now = r.bool() && !a.given, r.state(), r.int64()
		if r.err != nil {
			return nil, r.err
		}
		if a.Absent {
			a.State = rows[len(answers)].Terms.Full(a.Now)
		}
		answers = append(answers, a)
	}
	err := found.Err()
	if err == nil && len(answers) != len(rows) {
		err = fmt.Errorf("the statement answered for %d of %d rows", len(answers), len(rows))
	}
	return answers, err
}

// takeCluster takes from several buckets on one row each, all or nothing, in a statement that is its own transaction. It is undecided if
// another transaction holds a row, or changed it first.
func (u *Unit) takeCluster(ctx context.Context, asks []bucket.Ask) (answers []bucket.Answer, v verdict, err error) {
	found, err := u.conn.Query(ctx, u.statements.spendClusters, u.clusterParameters(asks, make(array[integer], len(asks)))...)
	if err == nil {
		answers, v, err = scanCluster(found, asks)
	}
	if wasOvertaken(err) {
		return nil, undecided, nil
	}
	return answers, v, err
}

// scanCluster returns the answers of clusters_spend.sql for one group.
func scanCluster(found pgx.Rows, asks []bucket.Ask) (answers []bucket.Answer, v verdict, err error) {
	rows, err := scanClusters(found, asks)
	if err != nil {
		return nil, undecided, err
	}
	answers = make([]bucket.Answer, len(asks))
	for i, r := range rows {
		answers[i] = r.Answer
		answers[i].Allowed, answers[i].Absent = r.enough, false
	}
	if v = verdictOn(asks, answers); v == allowed && !rows[0].given {
		v = undecided
	}
	return answers, v, nil
}

// wasOvertaken reports whether a statement for several rows took nothing because another transaction holds one, or was quicker.
func wasOvertaken(err error) bool {
	return IsLockTimeout(err) || IsConflict(err) || pgerr.Code(err) == codeUniqueViolation
}
