package ratelimit

import (
	"context"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// read reads the plan's buckets; a row that is not there reads as full.
func (l *Limiter) read(ctx context.Context, p *plan) ([]answer, error) {
	all, _ := p.rows()
	found, err := l.readRows(ctx, l.statements.read, all)
	if err == nil {
		err = allRows(found, all)
	}
	if err != nil {
		return nil, err
	}
	answers, _ := p.gather(found)
	return answers, nil
}

// allRows returns an error when the answers are not one for each row.
func allRows(answers []answer, all []ask) error {
	if len(answers) != len(all) {
		return fmt.Errorf("the statement answered for %d of %d rows", len(answers), len(all))
	}
	return nil
}

// gather returns the answers for the plan's buckets from those for all of their rows, and what is left of
// these.
func (p *plan) gather(found []answer) (answers, rest []answer) {
	answers = make([]answer, len(p.buckets))
	for i := range p.buckets {
		b := &p.buckets[i]
		n := int(max(b.terms.Shards, 1))
		answers[i].now = found[0].now
		answers[i].of(b, states(found[:n]))
		found = found[n:]
	}
	return answers, found
}

// readRows reads rows with one of the statements that do no more.
func (l *Limiter) readRows(ctx context.Context, statement string, all []ask) ([]answer, error) {
	c := (&plan{buckets: all}).columns()
	rows, err := l.db.Query(ctx, statement, c.names, c.keys, c.shards, l.asOf())
	if err != nil {
		return nil, err
	}
	return scanRows(rows, all)
}

// scanRows returns what the statements that only read answer for the rows.
func scanRows(rows pgx.Rows, all []ask) ([]answer, error) {
	i := 0
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (a answer, err error) {
		var value *float64
		var ts *int64
		if err := row.Scan(&value, &ts, &a.now); err != nil {
			return a, err
		}
		if i == len(all) {
			return a, fmt.Errorf("the statement answered for more than the %d rows that were asked for", len(all))
		}
		a.state = all[i].terms.Full(a.now)
		if value != nil && ts != nil {
			a.state = bucket.State{Value: *value, TS: *ts}
		}
		i++
		return a, nil
	})
}

// states returns what the rows hold.
func states(answers []answer) []bucket.State {
	found := make([]bucket.State, len(answers))
	for i, a := range answers {
		found[i] = a.state
	}
	return found
}

// project decides on states that were only read.
func (p *plan) project(answers []answer) []answer {
	for i, a := range answers {
		b := &p.buckets[i]
		if b.sharded() {
			answers[i].allowed = b.terms.TokensOf(a.rows, a.now)-b.cost >= b.lowest
			continue
		}
		_, answers[i].allowed = b.terms.Take(b.terms.FixClock(a.state, a.now), a.now, b.cost, b.lowest)
	}
	return answers
}

// columns are the plan's buckets as the array parameters of a statement.
type columns struct {
	names, keys                                 []string
	shards                                      []int32
	costs, capacities, rates, perPeriod, lowest []float64
	steps, phases, tolerances                   []int64
}

func (p *plan) columns() columns {
	var c columns
	for i := range p.buckets {
		b := &p.buckets[i]
		c.names, c.keys, c.shards = append(c.names, b.limit.name), append(c.keys, b.key), append(c.shards, b.shard)
		c.costs, c.lowest = append(c.costs, b.cost), append(c.lowest, b.lowest)
		c.capacities, c.rates = append(c.capacities, b.terms.Capacity), append(c.rates, b.terms.Rate)
		c.steps, c.perPeriod = append(c.steps, b.terms.Step), append(c.perPeriod, b.terms.Steps)
		c.phases, c.tolerances = append(c.phases, b.terms.Phase), append(c.tolerances, b.terms.Tolerance())
	}
	return c
}

// parameters returns those of bucket_take.sql and bucket_take_alone.sql.
func (l *Limiter) parameters(b *ask) []any {
	p := l.boxes.of(b)
	phase := p.phase
	if b.terms.Spread {
		phase = b.terms.Phase
	}
	cost := any(1.0) // as mostly, and no allocation
	if b.cost != 1 {
		cost = b.cost
	}
	return []any{
		p.name, b.key, b.shard, cost, p.capacity, p.rate, p.step, p.steps, phase, b.lowest, l.asOf(), p.tolerance,
	}
}

// boxed are those parameters that are the same for all buckets of a limit, as pgx wants them: each is an allocation.
type boxed struct{ name, capacity, rate, step, steps, phase, tolerance any }

// boxes keep the boxed parameters of limits. They are made again when maxBoxes are there: few programs have so many
// limits, and those that make them up must not fill the memory with them.
type boxes struct {
	mu   sync.RWMutex
	kept map[boxKey]*boxed
}

type boxKey struct {
	name  string
	terms bucket.Terms
}

const maxBoxes = 1024

// of returns the boxed parameters for the bucket.
func (x *boxes) of(b *ask) *boxed {
	key := boxKey{b.limit.name, b.terms}
	if key.terms.Spread {
		key.terms.Phase = 0
	}
	x.mu.RLock()
	p := x.kept[key]
	x.mu.RUnlock()
	if p != nil {
		return p
	}
	t := b.terms
	p = &boxed{
		name: b.limit.name, capacity: t.Capacity, rate: t.Rate, step: t.Step, steps: t.Steps, phase: t.Phase, tolerance: t.Tolerance(),
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.kept == nil || len(x.kept) >= maxBoxes {
		x.kept = make(map[boxKey]*boxed)
	}
	x.kept[key] = p
	return p
}

// columns returns the parameters of buckets_take.sql and of buckets_take_alone.sql.
func (l *Limiter) columns(p *plan) []any {
	c := p.columns()
	return []any{c.names, c.keys, c.shards, c.costs, c.capacities, c.rates, c.steps, c.perPeriod, c.phases, c.lowest, l.asOf(), c.tolerances}
}

// scan returns one answer for each row: allowed, value, ts, now, and held where the statement tells it.
func scan(rows pgx.Rows) ([]answer, error) { return scanInto(rows, nil) }

// scanInto is scan into the room that answers has.
func scanInto(rows pgx.Rows, answers []answer) ([]answer, error) {
	defer rows.Close()
	tellsHeld := len(rows.FieldDescriptions()) > 4
	for rows.Next() {
		answers = append(answers, answer{})
		a := &answers[len(answers)-1]
		columns := []any{&a.allowed, &a.state.Value, &a.state.TS, &a.now, &a.held}
		if !tellsHeld {
			columns = columns[:4]
		}
		if err := rows.Scan(columns...); err != nil {
			return nil, err
		}
	}
	return answers, rows.Err()
}
