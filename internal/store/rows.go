package store

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"strconv"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Look decides on each ask and takes nothing. A row that is absent counts as full. The answers are put into room if that has the capacity.
func (s *Session) Look(ctx context.Context, asks []bucket.Ask, room []bucket.Answer) ([]bucket.Answer, error) {
	rows := bucket.RowsOf(asks)
	found, err := s.engine().Read(ctx, &s.Unit, rows)
	if err == nil {
		err = answeredAll(found, rows)
	}
	if err != nil {
		return nil, err
	}
	answers := bucket.LookAt(asks, found, room)
	if bucket.AnyUnknown(asks) {
		return nil, ErrUnknownWindows
	}
	return answers, nil
}

// scanRows returns the answers of buckets_read.sql.
func scanRows(found pgx.Rows, rows []bucket.Ask) ([]bucket.Answer, error) {
	i := 0
	return pgx.CollectRows(found, func(row pgx.CollectableRow) (a bucket.Answer, err error) {
		var value *float64
		var ts *int64
		parts, err := scanWithParts(row, []any{&value, &ts, nil, nil, &a.Now}, 2)
		if err != nil {
			return a, err
		}
		if i == len(rows) {
			return a, fmt.Errorf("the statement answered for more than the %d rows that were asked for", len(rows))
		}
		a.State, a.Absent = rows[i].Terms.Full(a.Now), true
		if value != nil && ts != nil {
			a.State, a.Absent = bucket.State{Value: *value, TS: *ts, Parts: parts}, false
		}
		i++
		return a, nil
	})
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
	stepUs, phases, tolerances              array[bigint]
	since, until                            []*int64 // nil when the terms of all always hold
}

func columnsOf(asks []bucket.Ask) columns {
	var c columns
	for i := range asks {
		a := &asks[i]
		t := &a.Terms
		c.names, c.keys, c.shards = append(c.names, text(a.Key.Name)), append(c.keys, text(a.Key.Key)), append(c.shards, integer(a.Key.Shard))
		c.costs, c.lowest = append(c.costs, double(a.Cost)), append(c.lowest, double(a.Lowest))
		c.capacities, c.rates = append(c.capacities, double(t.Capacity)), append(c.rates, double(t.Rate))
		c.stepUs, c.steps = append(c.stepUs, bigint(t.Step)), append(c.steps, double(t.Steps))
		c.phases, c.tolerances = append(c.phases, bigint(t.Phase)), append(c.tolerances, bigint(t.Tolerance()))
	}
	if bucket.AnyEras(asks) {
		c.since, c.until = make([]*int64, len(asks)), make([]*int64, len(asks))
		for i := range asks {
			c.since[i], c.until[i] = spanOf(asks[i].Terms)
		}
	}
	return c
}

// spanOf returns the first and the last instant at which the terms hold, as parameters of a statement: null for terms
// that always do.
func spanOf(t bucket.Terms) (since, until *int64) {
	if t.Eras == nil {
		return nil, nil
	}
	first, next := t.Span()
	last := next - 1
	return &first, &last
}

// now returns the parameter that replaces the database's clock.
func (s *Store) now() *int64 {
	if s.asOf == nil {
		return nil
	}
	return s.asOf()
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

// takeParameters returns those of bucket_take.sql and bucket_take_alone.sql.
func (u *Unit) takeParameters(a *bucket.Ask) []any {
	p := u.limits.of(a)
	phase := p.phase
	if a.Terms.PhaseByKey {
		phase = a.Terms.Phase
	}
	cost := any(1.0) // as mostly, and no allocation
	if a.Cost != 1 {
		cost = a.Cost
	}
	return []any{
		p.name, a.Key.Key, a.Key.Shard, cost, p.capacity, p.rate, p.step, p.steps, phase, a.Lowest, u.now(), p.tolerance,
		p.since, p.until,
	}
}

// takeSeveralParameters returns those of buckets_take.sql.
func (u *Unit) takeSeveralParameters(asks []bucket.Ask) []any {
	c := columnsOf(asks)
	return []any{
		c.names, c.keys, c.shards, c.costs, c.capacities, c.rates, c.stepUs, c.steps, c.phases, c.lowest, u.now(), c.tolerances,
		c.since, c.until,
	}
}

// limitParameters keep those parameters that are the same for all buckets of a limit, as pgx wants them: each is an
// allocation. They are made again when maxLimitParameters are there: few programs have so many limits, and those that
// make them up must not fill the memory with them.
type limitParameters struct {
	mu   sync.RWMutex
	kept map[limitKey]*boxed
}

type limitKey struct {
	name  string
	terms bucket.Terms
}

// boxed are parameters of a limit, each in an interface.
type boxed struct{ name, capacity, rate, step, steps, period, phase, tolerance, since, until any }

const maxLimitParameters = 1024

// of returns the parameters for the limit of the bucket.
func (l *limitParameters) of(a *bucket.Ask) *boxed {
	key := limitKey{a.Key.Name, a.Terms}
	key.terms.Seed = 0
	if key.terms.PhaseByKey {
		key.terms.Phase = 0
	}
	l.mu.RLock()
	p := l.kept[key]
	l.mu.RUnlock()
	if p != nil {
		return p
	}
	t := a.Terms
	since, until := spanOf(t)
	p = &boxed{
		name: a.Key.Name, capacity: t.Capacity, rate: t.Rate, step: t.Step, steps: t.Steps, period: periodOf(t), phase: t.Phase,
		tolerance: t.Tolerance(), since: since, until: until,
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.kept == nil || len(l.kept) >= maxLimitParameters {
		l.kept = make(map[limitKey]*boxed)
	}
	l.kept[key] = p
	return p
}

// scanAnswers appends one answer for each row to the room of answers: allowed, value, ts and now.
func scanAnswers(rows pgx.Rows, answers []bucket.Answer) ([]bucket.Answer, error) {
	defer rows.Close()
	for rows.Next() {
		r := readerOf(rows)
		a := bucket.Answer{Allowed: r.bool(), State: bucket.State{Value: r.float64(), TS: r.int64()}, Now: r.int64()}
		if r.err != nil {
			return nil, r.err
		}
		answers = append(answers, a)
	}
	return answers, rows.Err()
}

// rowReader reads the columns of a row, one after the other: in binary, or as text, as the modes of pgx without prepared
// statements have them. pgx's own Scan plans it anew for each statement, which is two allocations.
type rowReader struct {
	values [][]byte
	fields []pgconn.FieldDescription
	next   int
	err    error
}

// readerOf returns the reader of the current row. It is good for until the next one.
func readerOf(row pgx.CollectableRow) rowReader {
	return rowReader{values: row.RawValues(), fields: row.FieldDescriptions()}
}

// column returns the next column, of so many bytes in binary.
func (r *rowReader) column(size int) (raw []byte, isText bool) {
	if r.err != nil {
		return nil, false
	}
	if r.next >= len(r.values) || r.next >= len(r.fields) {
		r.err = fmt.Errorf("the statement answered with %d columns", len(r.values))
		return nil, false
	}
	raw, isText = r.values[r.next], r.fields[r.next].Format == pgx.TextFormatCode
	r.next++
	if raw == nil || !isText && len(raw) != size {
		r.err = fmt.Errorf("column %d of the answer has %d bytes", r.next, len(raw))
		return nil, false
	}
	return raw, isText
}

func (r *rowReader) bool() bool {
	raw, isText := r.column(1)
	switch {
	case r.err != nil:
		return false
	case isText:
		return string(raw) == "t"
	}
	return raw[0] != 0
}

func (r *rowReader) int64() (n int64) {
	raw, isText := r.column(8)
	switch {
	case r.err != nil:
		return 0
	case isText:
		n, r.err = strconv.ParseInt(string(raw), 10, 64)
		return n
	}
	return int64(binary.BigEndian.Uint64(raw))
}

func (r *rowReader) float64() (n float64) {
	raw, isText := r.column(8)
	switch {
	case r.err != nil:
		return 0
	case isText:
		n, r.err = strconv.ParseFloat(string(raw), 64)
		return n
	}
	return math.Float64frombits(binary.BigEndian.Uint64(raw))
}

// rowParameters returns the parameters of the statements that read rows.
func (u *Unit) rowParameters(rows []bucket.Ask) []any {
	names, keys, shards := keysOf(rows)
	return []any{names, keys, shards, u.now()}
}
