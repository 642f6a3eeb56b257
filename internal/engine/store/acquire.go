package store

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// acquired are the leases that the calls of a group have taken on their bucket.
type acquired struct{ fence, end, last int64 } // the first number, the end of each, and the last end of all leases

// fenceStep is the difference of the numbers that acquire_set_1 gives to the calls for one bucket, as calls in turn
// would get.
const fenceStep = 1 << 16

// ok reports whether there are such leases.
func (a acquired) ok() bool { return a.end > 0 }

// acquireParameters returns the parameters of acquire_set_1 for rows under one policy.
func (s *Session) acquireParameters(rows []*row, waits bool) []any {
	n := len(rows)
	keys, sums, counts := make(array[text], n), make(array[double], n), make(array[bigint], n)
	var places, slots, nths array[bigint]
	for i, r := range rows {
		keys[i], sums[i], counts[i] = text(r.ask.Key.Key), double(r.ask.Cost), bigint(len(r.group.calls))
		for nth, c := range r.group.calls {
			places, slots, nths = append(places, bigint(i+1)), append(slots, bigint(c.Asks[0].Cost)), append(nths, bigint(nth))
		}
	}
	t := &rows[0].ask.Terms
	kind, _ := t.Kind.(bucket.Concurrent)
	since, until := spanOf(t)
	return []any{
		rows[0].ask.Key.Name, keys, sums, counts, places, slots, nths, t.Capacity, kind.Lease, since, until,
		s.AsOf(), waits,
	}
}

// scanAcquired reads the answers of acquire_set_1. The first one for a row counts.
func scanAcquired(found pgx.Rows, rows []*row) error {
	var place int64
	var a bucket.Answer
	var fence, end, last pgtype.Int8
	var leases []int64
	columns := []any{
		&place, &a.Allowed, &a.State.Value, &a.State.TS, &a.State.Capacity, &fence, &end, &last, &leases,
		&a.Now,
	}
	_, err := pgx.ForEachRow(found, columns, func() error {
		if place < 1 || place > int64(len(rows)) {
			return errUnasked
		}
		r := rows[place-1]
		if r.found {
			return nil
		}
		if r.answer, r.found = a, true; a.Allowed {
			r.acquired = acquired{fence.Int64, end.Int64, last.Int64}
		} else {
			r.answer.State.Parts = &bucket.Parts{Leases: leases}
		}
		return nil
	})
	return err
}

// acquireFor takes leases for the calls of one row, and waits for it.
func (s *Session) acquireFor(ctx context.Context, r *row) error {
	r.found, r.answer, r.acquired = false, bucket.Answer{}, acquired{}
	rows := []*row{r}
	found, err := s.conn.Query(ctx, s.statements.acquireSet, s.acquireParameters(rows, true)...)
	if err != nil {
		return err
	}
	return scanAcquired(found, rows)
}

// setAcquired sets the answers to the calls of a group, each of which has taken a lease after those before it. acquired
// stays if the row has other leases, which nobody has read.
func (g *group) setAcquired() {
	r, value := g.row, g.row.answer.State.Value
	for _, c := range g.calls {
		value += c.Asks[0].Cost
	}
	all := &bucket.Parts{Leases: []int64{r.answer.State.TS}}
	for i, c := range g.calls {
		slots := c.Asks[0].Cost
		value -= slots
		c.Answers = c.room()
		c.Answers[0] = r.answer
		newest := bucket.Held{Fence: r.acquired.fence + int64(i)*fenceStep, End: r.acquired.end, Slots: int64(slots)}
		c.Answers[0].State = bucket.Acquired(value, r.answer.State.TS, r.answer.State.Capacity, newest, r.acquired.last)
		all.Leases[0], all.Leases = newest.Fence, append(all.Leases, newest.Fence, newest.End, newest.Slots)
	}
	if r.answer.State.Value+r.ask.Cost == r.answer.State.Capacity { // others hold none, so all is known
		r.answer.State.Parts, r.acquired = all, acquired{}
	}
}
