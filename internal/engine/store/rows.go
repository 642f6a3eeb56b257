package store

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// Look decides on each ask and takes nothing. A row that is absent counts as full. The answers are put into room if
// that has the capacity.
func (s *Session) Look(ctx context.Context, asks []bucket.Ask, room []bucket.Answer) ([]bucket.Answer, error) {
	found, err := s.Engine().Read(ctx, &s.Unit, asks)
	if err == nil {
		err = answeredAll(found, asks)
	}
	if err != nil {
		return nil, err
	}
	return (&bucket.Page{}).LookAt(asks, found, room), nil
}

// scanRows returns the answers of buckets_read.sql, and whether row level security applies to the role.
func scanRows(found pgx.Rows, rows []bucket.Ask) (answers []bucket.Answer, filtered bool, err error) {
	i := 0
	answers, err = pgx.CollectRows(found, func(row pgx.CollectableRow) (a bucket.Answer, err error) {
		var value, capacity *float64
		var ts *int64
		parts, err := ScanWithParts(row, []any{&value, &ts, &capacity, nil, nil, &a.Now, &filtered}, 3)
		if err != nil {
			return a, err
		}
		if i == len(rows) {
			return a, fmt.Errorf("the statement answered for more than the %d rows that were asked for", len(rows))
		}
		a.State, a.Absent = rows[i].Terms.Full(a.Now), true
		if value != nil && ts != nil && capacity != nil {
			a.State, a.Absent = bucket.State{Value: *value, TS: *ts, Capacity: *capacity, Parts: parts}, false
		}
		i++
		return a, nil
	})
	return answers, filtered, err
}

// answeredAll returns an error when the answers are not one for each row.
func answeredAll(answers []bucket.Answer, rows []bucket.Ask) error {
	if len(answers) != len(rows) {
		return fmt.Errorf("the statement answered for %d of %d rows", len(answers), len(rows))
	}
	return nil
}

// columns are asks as the array parameters of a statement.
type columns struct {
	names, keys                             array[text]
	shards                                  array[integer]
	costs, capacities, rates, steps, lowest array[double]
	stepUs, phases                          array[bigint]
	since, until                            []*int64 // nil when the terms of all always hold
}

func columnsOf(asks []bucket.Ask) columns {
	n := len(asks)
	var c columns
	c.names, c.keys, c.shards = keysOf(asks)
	c.costs, c.lowest, c.stepUs, c.phases = make(array[double], n), make(array[double], n), make(array[bigint], n),
		make(array[bigint], n)
	c.capacities, c.rates, c.steps = make(array[double], n), make(array[double], n), make(array[double], n)
	for i := range asks {
		a := &asks[i]
		t := &a.Terms
		c.costs[i], c.lowest[i], c.stepUs[i], c.phases[i] = double(a.Cost), double(a.Lowest), bigint(t.Step), bigint(t.Phase)
		c.capacities[i], c.rates[i], c.steps[i] = double(t.Capacity), double(t.Rate), double(t.Steps)
	}
	c.since, c.until = spansOf(n, func(i int) *bucket.Terms { return &asks[i].Terms })
	return c
}

// spansOf returns what spanOf does for n terms, as array parameters: nil when all always hold.
func spansOf(n int, terms func(i int) *bucket.Terms) (since, until []*int64) {
	if !bucket.AnySpan(n, terms) {
		return nil, nil
	}
	since, until = make([]*int64, n), make([]*int64, n)
	for i := range n {
		since[i], until[i] = spanOf(terms(i))
	}
	return since, until
}

// spanOf returns the first and the last instant at which the terms hold, as parameters of a statement: null for terms
// that always do.
func spanOf(t *bucket.Terms) (since, until *int64) {
	if !t.HasSpan() {
		return nil, nil
	}
	first, next := t.Span()
	last := next - 1
	return &first, &last
}

// keysOf returns the keys of the asks as array parameters.
func keysOf(asks []bucket.Ask) (names, keys array[text], shards array[integer]) {
	return keyColumns(len(asks), func(i int) bucket.Key { return asks[i].Key })
}

// keyColumns returns n keys as array parameters.
func keyColumns(n int, key func(i int) bucket.Key) (names, keys array[text], shards array[integer]) {
	names, keys, shards = make(array[text], n), make(array[text], n), make(array[integer], n)
	for i := range n {
		k := key(i)
		names[i], keys[i], shards[i] = text(k.Name), text(k.Key), integer(k.Shard)
	}
	return names, keys, shards
}

// rowParameters returns the parameters of the statements that read rows.
func (u *Unit) rowParameters(rows []bucket.Ask) []any {
	names, keys, shards := keysOf(rows)
	return []any{names, keys, shards, u.AsOf()}
}
