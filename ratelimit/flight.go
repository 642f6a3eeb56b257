package ratelimit

import (
	"context"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// classDataException begins the SQLSTATEs of values that cannot be used.
const classDataException = "22"

// alone answers c by itself.
func (l *Limiter) alone(ctx context.Context, c *call) error {
	switch {
	case c.reserve:
		return l.together(ctx, func(tx *Limiter) (err error) {
			c.reservation, err = tx.reserve(ctx, c.plan)
			return err
		})
	case c.look:
		answers, err := l.read(ctx, c.plan)
		c.answers = answers
		return err
	}
	return l.standalone(ctx, func() (err error) {
		c.answers, err = l.run(ctx, c.plan)
		return err
	})
}

// lineup are the calls of a flight for one bucket that no other call of it asks for together with another.
type lineup struct {
	bucket bucket // with what the calls ask for together
	calls  []*call
	answer answer
	found  bool // whether the answer is there: no row of the bucket may have been
}

// fly answers calls in one or two round trips of their own, and in a few more those it then knows to be at the
// edge of a limit.
//
// Where each of the calls for a bucket asks for it alone, all they cost is taken at once; if that is there,
// they all are allowed. The rest is decided one call after the other, on rows that are locked, once a look
// without locks has not refused it. It answers every call, with an error when the statement for it failed.
func (l *Limiter) fly(ctx context.Context, calls []*call) {
	lineups, others := line(calls)
	looked := make([][]answer, len(others))
	err := l.standalone(ctx, func() error { return l.spend(ctx, lineups, others, looked) })
	if isDataError(err) && len(calls) > 1 { // one of them is to blame, and the others are not to suffer for it
		half := len(calls) / 2
		l.fly(ctx, calls[:half])
		l.fly(ctx, calls[half:])
		return
	}
	if err != nil {
		for _, c := range calls {
			c.finish(err)
		}
		return
	}
	var open []*call
	for _, line := range lineups {
		open = append(open, line.finish()...)
	}
	for i, c := range others {
		c.answers = looked[i]
		switch {
		case c.look:
			c.finish(nil)
		case !c.reserve && c.plan.hopeless(looked[i]):
			c.answers = c.plan.project(c.answers)
			c.finish(nil)
		default:
			open = append(open, c)
		}
	}
	if len(open) > 0 {
		slices.SortFunc(open, func(a, b *call) int { return a.seat - b.seat })
		l.decideHeld(ctx, open)
	}
}

// isDataError reports whether a statement failed for a value it was sent, as for a key with characters that
// the database's encoding lacks.
func isDataError(err error) bool { return strings.HasPrefix(sqlstate(err), classDataException) }

// line arranges the calls of a flight: those whose bucket can be asked for the sum of their costs, by
// bucket in the order of locking, and the others.
func line(calls []*call) (lineups []*lineup, others []*call) {
	shared := make(map[which]bool) // with calls that need more than one bucket, or may owe
	byBucket := make(map[which]*lineup, len(calls))
	for i, c := range calls {
		c.seat = i
		if !c.look && !c.simple() {
			for j := range c.plan.buckets {
				shared[c.plan.buckets[j].whole()] = true
			}
		}
	}
	for _, c := range calls {
		b := &c.plan.buckets[0]
		if c.look || !c.simple() || shared[b.whole()] {
			others = append(others, c)
			continue
		}
		at := byBucket[b.whole()]
		if at == nil {
			at = &lineup{bucket: *b}
			at.bucket.cost = 0
			byBucket[b.whole()] = at
			lineups = append(lineups, at)
		}
		if at.bucket.terms != b.terms {
			others = append(others, c)
			continue
		}
		at.calls = append(at.calls, c)
	}
	slices.SortFunc(lineups, func(a, b *lineup) int { return a.bucket.which().compare(b.bucket.which()) })
	return lineups, others
}

// simple reports whether c asks for one bucket on one row, without owing.
func (c *call) simple() bool {
	b := &c.plan.buckets[0]
	return len(c.plan.buckets) == 1 && !c.reserve && !b.parted() && b.cost > 0
}

// aim sets how much the lineup asks for: what as many of its calls cost as the bucket may hold at most. It
// returns false when the statement could not tell that amount to the last bit, as it gets to know it as what
// is missing from a full bucket.
func (at *lineup) aim() bool {
	capacity, sum := at.bucket.terms.capacity, 0.0
	for _, c := range at.calls {
		if next := sum + c.plan.buckets[0].cost; next <= capacity {
			sum = next
		} else {
			break
		}
	}
	at.bucket.cost = sum
	return capacity-(capacity-sum) == sum
}

// spend asks for what the lineups want and looks at what the others are about, in one round trip.
func (l *Limiter) spend(ctx context.Context, lineups []*lineup, others []*call, looked [][]answer) error {
	batch := &pgx.Batch{}
	var groups [][]*lineup
	for rest := lineups; len(rest) > 0; {
		n := 1
		for n < len(rest) && rest[n].bucket.limit.name == rest[0].bucket.limit.name {
			n++
		}
		group := slices.DeleteFunc(slices.Clone(rest[:n]), func(at *lineup) bool {
			return !at.aim() || !at.bucket.terms.like(rest[0].bucket.terms)
		})
		rest = rest[n:]
		if len(group) > 0 {
			groups = append(groups, group)
			l.queueSpend(batch, group)
		}
	}
	var rows []bucket
	for _, c := range others {
		all, _ := c.plan.rows()
		rows = append(rows, all...)
	}
	if len(rows) > 0 {
		c := (&plan{buckets: rows}).columns()
		batch.Queue(l.statements.read, c.names, c.keys, c.shards, l.asOf())
	}
	if batch.Len() == 0 {
		return nil
	}
	return l.receive(ctx, batch, groups, others, rows, looked)
}

// like reports whether two policies for a name differ in no more than where their windows begin.
func (t terms) like(o terms) bool {
	t.phase, o.phase = 0, 0
	return t == o
}

// queueSpend queues the statement for the lineups of one limit.
func (l *Limiter) queueSpend(batch *pgx.Batch, group []*lineup) {
	n := len(group)
	keys, shards, costs, phases := make([]string, n), make([]int32, n), make([]float64, n), make([]int64, n)
	for i, at := range group {
		b := &at.bucket
		keys[i], shards[i], costs[i], phases[i] = b.key, b.shard, b.cost, b.terms.phase
	}
	t := group[0].bucket.terms
	batch.Queue(l.statements.spend, group[0].bucket.limit.name, keys, shards, costs,
		t.capacity, t.rate, t.step, t.steps, phases, l.asOf(), t.tolerance())
}

// receive sends the batch of spend and distributes its answers.
func (l *Limiter) receive(ctx context.Context, batch *pgx.Batch, groups [][]*lineup, others []*call, rows []bucket, looked [][]answer) (err error) {
	results := l.db.SendBatch(ctx, batch)
	defer func() {
		if closeErr := results.Close(); err == nil {
			err = closeErr
		}
	}()
	for _, group := range groups {
		i := 0
		rows, err := results.Query()
		if err != nil {
			return err
		}
		var a answer
		var value *float64
		var ts *int64
		_, err = pgx.ForEachRow(rows, []any{&a.allowed, &value, &ts, &a.now}, func() error {
			at := group[i]
			at.answer, at.found = a, value != nil && ts != nil
			if at.found {
				at.answer.state = state{value: *value, ts: *ts}
			}
			i++
			return nil
		})
		if err != nil {
			return err
		}
	}
	if len(rows) == 0 {
		return nil
	}
	found, err := results.Query()
	if err != nil {
		return err
	}
	answers, err := scanRows(found, rows)
	if err != nil {
		return err
	}
	for i, c := range others {
		looked[i], answers = c.plan.gather(answers)
	}
	return nil
}

// finish answers the calls of the lineup that can be answered, and returns the others.
func (at *lineup) finish() (open []*call) {
	b := &at.bucket
	if at.answer.allowed {
		sum, n := 0.0, 0
		for sum < b.cost {
			sum += at.calls[n].plan.buckets[0].cost
			n++
		}
		a := at.answer
		for i := n - 1; i >= 0; i-- { // the state after each is that after the next, without what that took
			c := at.calls[i]
			c.one[0] = a
			a.state.value += c.plan.buckets[0].cost
		}
		for _, c := range at.calls[:n] {
			c.answers = c.one[:]
			c.finish(nil)
		}
		return at.calls[n:]
	}
	for i, c := range at.calls {
		own := &c.plan.buckets[0]
		if !at.found || own.terms.ahead(at.answer.state, at.answer.now) || own.overtaken(at.answer) {
			return at.calls[i:] // those behind it too: what it takes is missing when it is their turn
		}
		c.one[0] = at.answer
		c.answers = c.one[:]
		c.finish(nil)
	}
	return nil
}

// hopeless reports whether a look at the plan's buckets is enough to refuse it. Where a wrong clock has to be
// mended it is not.
func (p *plan) hopeless(answers []answer) bool {
	for i := range p.buckets {
		if b := &p.buckets[i]; !b.parted() && b.terms.ahead(answers[i].state, answers[i].now) {
			return false
		}
	}
	return slices.ContainsFunc(p.project(slices.Clone(answers)), func(a answer) bool { return !a.allowed })
}

// decideHeld answers calls one after the other on locked rows, in a transaction of its own.
func (l *Limiter) decideHeld(ctx context.Context, calls []*call) {
	plans := make([]*plan, len(calls))
	for i, c := range calls {
		plans[i] = c.plan
	}
	err := l.together(ctx, func(tx *Limiter) error {
		h, err := tx.hold(ctx, plans...)
		if err != nil {
			return err
		}
		for _, c := range calls {
			c.answers = h.take(c.plan)
		}
		if err := tx.saveHeld(ctx, h); err != nil {
			return err
		}
		for _, c := range calls {
			if !c.reserve {
				continue
			}
			if c.reservation, err = tx.recordTaken(ctx, c.plan, c.answers); err != nil {
				return err
			}
		}
		return nil
	})
	for _, c := range calls {
		c.finish(err)
	}
}
