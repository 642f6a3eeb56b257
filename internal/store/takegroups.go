package store

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// takeGroup takes what the calls for one bucket want, and waits for its row, as it holds none meanwhile.
func (s *Session) takeGroup(ctx context.Context, g *group) error {
	batch := &pgx.Batch{}
	statement, parameters, scan := s.statementFor(&g.row)
	batch.Queue(statement, parameters...)
	return s.Send(ctx, batch, func(results pgx.BatchResults) error {
		rows, err := results.Query()
		if err != nil {
			return err
		}
		answers, err := scan(rows, nil)
		if err != nil {
			return err
		}
		if g.found = len(answers) == 1; g.found {
			g.answer = answers[0]
		}
		g.absent = !g.found && g.row.Terms.HasSpan()
		return nil
	})
}

// takeGroups takes what the groups and the clusters want and reads what the others are about, in one round trip. What groups want it
// takes by buckets_spend.sql or buckets_spend_bold.sql, which is spend, and what is of sliding windows by windows_spend.sql.
func (s *Session) takeGroups(ctx context.Context, groups []*group, cs *clusters, others []*Call, spend string) error {
	batch := &pgx.Batch{}
	policies := byPolicy(groups)
	for _, ofPolicy := range policies {
		s.queueGroups(batch, ofPolicy, spend)
	}
	cs.queue(s, batch)
	var rows []bucket.Ask
	for _, c := range others {
		rows = append(rows, bucket.RowsOf(c.Asks)...)
	}
	if len(rows) > 0 {
		batch.Queue(s.statements.read, s.rowParameters(rows)...)
	}
	return s.Send(ctx, batch, func(results pgx.BatchResults) error {
		for _, ofPolicy := range policies {
			if err := receiveGroups(results, ofPolicy, spend == s.statements.spendBold); err != nil {
				return asHeld(err, nil, askedRows(groups))
			}
		}
		if err := cs.receive(results); err != nil || len(rows) == 0 {
			return err
		}
		return receiveRows(results, rows, others)
	})
}

// askedRows returns the rows that the groups ask.
func askedRows(groups []*group) []bucket.Ask {
	rows := make([]bucket.Ask, len(groups))
	for i, g := range groups {
		rows[i] = g.row
	}
	return rows
}

// receiveRows distributes the answers to a look at the rows of others.
func receiveRows(results pgx.BatchResults, rows []bucket.Ask, others []*Call) error {
	found, err := results.Query()
	if err != nil {
		return err
	}
	answers, err := scanRows(found, rows)
	if err == nil {
		err = answeredAll(answers, rows)
	}
	if err != nil {
		return err
	}
	for _, c := range others {
		var n int
		for i := range c.Asks {
			n += c.Asks[i].RowCount()
		}
		c.Answers, answers = bucket.LookAt(c.Asks, answers[:n], c.one[:0]), answers[n:]
	}
	return nil
}

// queueGroups queues the statement for the groups of one policy: spend, or that for sliding windows.
func (s *Session) queueGroups(batch *pgx.Batch, groups []*group, spend string) {
	n := len(groups)
	keys, shards, costs, phases := make(array[text], n), make(array[integer], n), make(array[double], n), make(array[bigint], n)
	for i, g := range groups {
		keys[i], shards[i] = text(g.row.Key.Key), integer(g.row.Key.Shard)
		costs[i], phases[i] = double(g.row.Cost), bigint(g.row.Terms.Phase)
	}
	first := &groups[0].row
	t := first.Terms
	since, until := spanOf(&t)
	if slides(first) {
		batch.Queue(s.statements.windowsSpend, first.Key.Name, keys, shards, costs,
			t.Capacity, t.Step, periodOf(t), t.Phase, s.AsOf(), t.Tolerance(), since, until)
		return
	}
	batch.Queue(spend, first.Key.Name, keys, shards, costs,
		t.Capacity, t.Rate, t.Step, t.Steps, phases, s.AsOf(), t.Tolerance(), since, until)
}

// receiveGroups gives each group of a policy its answer. Those of a statement that is not bold come in the order asked,
// but for what is left out and, behind the others, refusals.
func receiveGroups(results pgx.BatchResults, groups []*group, bold bool) error {
	for _, g := range groups { // of an attempt before
		g.answer, g.found = bucket.Answer{}, false
	}
	if bold && groups[0].isPlain() {
		return receiveBold(results, groups)
	}
	rows, err := results.Query()
	if err != nil {
		return err
	}
	var key string
	var shard int32
	var a bucket.Answer
	var taken []float64
	columns := []any{&key, &shard, &a.Allowed, &a.State.Value, &a.State.TS, &a.Now}
	if slides(&groups[0].row) {
		columns = append(columns, &taken)
	}
	next := 0
	_, err = pgx.ForEachRow(rows, columns, func() error {
		for range groups {
			g := groups[next%len(groups)]
			next++
			if g.row.Key.Key == key && g.row.Key.Shard == shard {
				g.answer, g.found = a, true
				if taken != nil {
					g.answer.State.Parts = &bucket.Parts{Taken: taken}
				}
				return nil
			}
		}
		return errUnasked
	})
	return err
}
