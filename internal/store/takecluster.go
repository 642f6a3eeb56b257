package store

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// clusterParameters returns those of clusters_spend.sql.
func (u *Unit) clusterParameters(rows []clusterRow) []any {
	n := len(rows)
	names, keys, shards := make(array[text], n), make(array[text], n), make(array[integer], n)
	costs, capacities, rates, steps, lowest := make(array[double], n), make(array[double], n), make(array[double], n), make(array[double], n), make(array[double], n)
	stepUs, phases, tolerances, of := make(array[bigint], n), make(array[bigint], n), make(array[bigint], n), make(array[integer], n)
	for i := range rows {
		r := &rows[i]
		t := &r.ask.Terms
		names[i], keys[i], shards[i] = text(r.ask.Key.Name), text(r.ask.Key.Key), integer(r.ask.Key.Shard)
		costs[i], lowest[i], of[i] = double(r.cost), double(r.lowest), integer(r.cluster)
		capacities[i], rates[i], steps[i] = double(t.Capacity), double(t.Rate), double(t.Steps)
		stepUs[i], phases[i], tolerances[i] = bigint(t.Step), bigint(t.Phase), bigint(t.Tolerance())
	}
	since, until := spansOf(n, func(i int) *bucket.Terms { return &rows[i].ask.Terms })
	return []any{
		names, keys, shards, costs, capacities, rates, stepUs, steps, phases, lowest, of, u.AsOf(), tolerances, since, until,
	}
}

// scanClusterRows reads the answers of clusters_spend.sql into rows, and calls isGiven for each with whether its cluster was
// given.
func scanClusterRows(found pgx.Rows, rows []clusterRow, isGiven func(of int, given bool)) error {
	defer found.Close()
	next := 0
	for found.Next() {
		if next == len(rows) {
			return fmt.Errorf("the statement answered for more than the %d rows that were asked for", len(rows))
		}
		row := &rows[next]
		next++
		r := readerOf(found)
		given, enough, absent := r.bool(), r.bool(), r.bool()
		state, now := bucket.State{Value: r.float64(), TS: r.int64()}, r.int64()
		if r.err != nil {
			return r.err
		}
		if absent = absent && !given; absent {
			state = row.ask.Terms.Full(now)
		}
		row.enough, row.found = enough, bucket.Answer{Allowed: given, State: state, Now: now, Absent: absent}
		isGiven(row.cluster, given)
	}
	if err := found.Err(); err != nil {
		return err
	}
	if next != len(rows) {
		return fmt.Errorf("the statement answered for %d of %d rows", next, len(rows))
	}
	return nil
}

// queue queues what takes for the clusters, if there are any.
func (cs *clusters) queue(s *Session, batch *pgx.Batch) {
	if cs != nil {
		batch.Queue(s.statements.spendClusters, s.clusterParameters(cs.rows)...)
	}
}

// receive reads the answers to what queue queues.
func (cs *clusters) receive(results pgx.BatchResults) error {
	if cs == nil {
		return nil
	}
	for _, of := range cs.of { // after an attempt before
		of.given = false
	}
	cs.failed = true
	found, err := results.Query()
	if err != nil {
		return err
	}
	if err := scanClusterRows(found, cs.rows, func(of int, given bool) { cs.of[of].given = given }); err != nil {
		return err
	}
	cs.failed = false
	cs.setAnswers()
	return nil
}

// takeCluster takes from several buckets on one row each, all or nothing, in a statement that is its own transaction. It is undecided where
// somebody holds a row, or was quicker.
func (u *Unit) takeCluster(ctx context.Context, asks []bucket.Ask) (answers []bucket.Answer, v verdict, err error) {
	rows := clusterOf(asks)
	found, err := u.conn.Query(ctx, u.statements.spendClusters, u.clusterParameters(rows)...)
	if err == nil {
		answers, v, err = scanCluster(asks, found, rows)
	}
	if u.wasOvertaken(err) {
		return nil, undecided, nil
	}
	return answers, v, err
}

// wasOvertaken reports whether a statement for several rows that is its own transaction has undone itself, because somebody makes one of the
// rows, or has made it meanwhile.
func (u *Unit) wasOvertaken(err error) bool {
	return u.mode == alone && (IsLockTimeout(err) || SQLState(err) == codeDivisionByZero)
}

// clusterOf returns the rows of one cluster.
func clusterOf(asks []bucket.Ask) []clusterRow {
	rows := make([]clusterRow, len(asks))
	for i := range asks {
		rows[i] = clusterRow{ask: &asks[i], cost: asks[i].Cost, lowest: asks[i].Lowest}
	}
	return rows
}

// scanCluster returns the answers of clusters_spend.sql for one cluster.
func scanCluster(asks []bucket.Ask, found pgx.Rows, rows []clusterRow) (answers []bucket.Answer, v verdict, err error) {
	given := false
	if err := scanClusterRows(found, rows, func(_ int, of bool) { given = of }); err != nil {
		return nil, undecided, err
	}
	answers = make([]bucket.Answer, len(rows))
	for i := range rows {
		answers[i] = rows[i].found
		answers[i].Allowed, answers[i].Absent = rows[i].enough, false
	}
	if v = verdictOn(asks, answers); v == allowed && !given {
		return answers, undecided, nil
	}
	return answers, v, nil
}
