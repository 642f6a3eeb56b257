package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// held are rows that a transaction has locked and read, to be decided on by package bucket. It
// takes one round trip more than the statements that decide by themselves, and can do what these cannot:
// decide on many calls one after the other, and on a bucket spread over several rows as a whole.
type held struct {
	rows    []ask // in the order of locking
	states  []bucket.State
	now     int64
	made    []bool // which of them were not there before
	changed []bool
	locked  []bool             // which of them are locked: all of them, but for those that lockFree left out
	index   map[bucket.Key]int // of the first row of each bucket
}

// hold locks and reads every row of the plans' buckets, on l, which must be bound to a transaction.
func (l *Limiter) hold(ctx context.Context, plans ...*plan) (*held, error) {
	return l.holdAfter(ctx, &pgx.Batch{}, plans...)
}

// holdAfter is hold after what is in batch, in the same round trip. In a transaction of the Limiter's own it
// returns a heldError when somebody holds a row.
func (l *Limiter) holdAfter(ctx context.Context, batch *pgx.Batch, plans ...*plan) (h *held, err error) {
	h, err = l.lockFree(ctx, batch, plans...)
	if err == nil {
		if row, found := h.notLocked(); found {
			return nil, &heldError{row}
		}
	}
	return h, err
}

// notLocked returns the first row that is not locked, if there is one.
func (h *held) notLocked() (row bucket.Key, found bool) {
	if i := slices.Index(h.locked, false); i >= 0 {
		return h.rows[i].rowKey(), true
	}
	return bucket.Key{}, false
}

// missesRow returns the first row of the plan that is not locked, if there is one.
func (h *held) missesRow(p *plan) (row bucket.Key, found bool) {
	if !slices.Contains(h.locked, false) {
		return bucket.Key{}, false
	}
	rows, _ := p.rows()
	for i := range rows {
		if k := rows[i].rowKey(); !h.locked[h.index[k]] {
			return k, true
		}
	}
	return bucket.Key{}, false
}

// lockFree locks and reads the rows of the plans' buckets, after what is in batch and in the same round trip. In a
// transaction of the Limiter's own it leaves out those that somebody holds, but for the one that it is to wait for,
// which it locks first. When the call has waited for many it waits for the others too, for a little. In a caller's
// transaction, which may hold rows already, it waits for all of them, in the order of locking.
func (l *Limiter) lockFree(ctx context.Context, batch *pgx.Batch, plans ...*plan) (h *held, err error) {
	h = newHeld(plans)
	l.enter(ctx, &plan{buckets: h.rows})
	statement := l.statements.hold
	switch {
	case !l.own:
	case l.waits < manyWaits:
		statement = l.statements.lock
		l.queueWait(batch, h.rows)
	default:
		l.queueWait(batch, h.rows)
		batch.Queue(l.statements.boundWait, longWait(l.waits))
	}
	failed := func(err error) error { // a caller's transaction waits as long as its own settings say
		if l.own {
			return &boundError{err, h.rows}
		}
		return err
	}
	before := batch.Len()
	l.queueHold(batch, statement, h.rows)
	results := l.db.SendBatch(ctx, batch)
	defer func() {
		if closeErr := results.Close(); err == nil {
			err = closeErr
		}
	}()
	for range before {
		if _, err := results.Exec(); err != nil {
			return nil, err
		}
	}
	rows, err := results.Query()
	if err != nil {
		return nil, failed(err)
	}
	var k bucket.Key
	var found bucket.State
	var made bool
	tag, err := pgx.ForEachRow(rows, []any{&k.Name, &k.Key, &k.Shard, &found.Value, &found.TS, &h.now, &made}, func() error {
		i, asked := h.index[k]
		if !asked {
			return errors.New("the statement answered for a row that was not asked for")
		}
		h.states[i], h.made[i], h.locked[i] = found, made, true
		return nil
	})
	if err != nil {
		return nil, failed(err)
	}
	if statement == l.statements.hold && tag.RowsAffected() != int64(len(h.rows)) {
		err = fmt.Errorf("the statement answered for %d of %d rows", tag.RowsAffected(), len(h.rows))
	}
	for i := range h.rows { // what is decided on them brings them back to the present
		if err == nil && h.locked[i] && h.rows[i].terms.FromFuture(h.states[i], h.now) {
			l.tell(ctx, Mended{Limit: h.rows[i].limit.name})
		}
	}
	return h, err
}

// newHeld returns the rows of the plans' buckets, not yet read.
func newHeld(plans []*plan) *held {
	h := &held{index: make(map[bucket.Key]int)}
	for _, p := range plans {
		rows, _ := p.rows()
		h.rows = append(h.rows, rows...)
	}
	slices.SortFunc(h.rows, func(a, b ask) int { return a.rowKey().Compare(b.rowKey()) })
	h.rows = slices.CompactFunc(h.rows, func(a, b ask) bool { return a.rowKey() == b.rowKey() })
	for i := range h.rows {
		h.index[h.rows[i].rowKey()] = i
	}
	h.states, h.made = make([]bucket.State, len(h.rows)), make([]bool, len(h.rows))
	h.changed, h.locked = make([]bool, len(h.rows)), make([]bool, len(h.rows))
	return h
}

// of returns the rows of a bucket.
func (h *held) of(b *ask) (states []bucket.State, changed []bool) {
	first := h.index[b.first()]
	n := first + int(max(b.terms.Shards, 1))
	return h.states[first:n], h.changed[first:n]
}

// first names the first row of the bucket.
func (b *ask) first() bucket.Key {
	if b.sharded() {
		return b.bucketKey()
	}
	return b.rowKey()
}

// take decides on the call p, all or nothing, as if it came after those decided before.
func (h *held) take(p *plan) []answer {
	answers := make([]answer, len(p.buckets))
	all := true
	for i := range p.buckets {
		b := &p.buckets[i]
		states, _ := h.of(b)
		answers[i].allowed = b.terms.TakeRows(slices.Clone(states), h.now, b.cost, b.lowest)
		all = all && answers[i].allowed
	}
	for i := range p.buckets {
		b := &p.buckets[i]
		states, changed := h.of(b)
		before := slices.Clone(states)
		if all {
			b.terms.TakeRows(states, h.now, b.cost, b.lowest)
		}
		shard := b.terms.OfShard()
		for j := range states {
			states[j] = shard.FixClock(states[j], h.now)
			changed[j] = changed[j] || states[j] != before[j]
		}
		answers[i].now = h.now
		answers[i].of(b, slices.Clone(states))
	}
	return answers
}

// charge takes amount from a bucket whatever it holds, or credits it when negative, unless the current
// step begins after until. It mirrors buckets_charge.sql.
func (h *held) charge(b *ask, amount float64, until int64) {
	if amount == 0 || amount < 0 && b.terms.Begin(h.now) > until {
		return
	}
	states, changed := h.of(b)
	for i := range changed {
		changed[i] = true
	}
	if amount > 0 {
		b.terms.ChargeRows(states, h.now, amount)
		return
	}
	first := h.index[b.first()]
	for i := range states {
		if h.made[first+i] { // it is full, and was so before
			states[i] = bucket.State{Value: max(states[i].Value, b.most/float64(len(states))), TS: min(b.terms.Begin(h.now), bucket.LongAgo)}
		}
	}
	b.terms.CreditRows(states, h.now, -amount, b.most)
}

// saveHeld writes the rows that were changed.
func (l *Limiter) saveHeld(ctx context.Context, h *held) error {
	batch := &pgx.Batch{}
	l.queueSave(batch, h)
	return l.db.SendBatch(ctx, batch).Close()
}

// queueSave queues what saveHeld sends, if there is anything.
func (l *Limiter) queueSave(batch *pgx.Batch, h *held) {
	var names, keys []string
	var shards []int32
	var values []float64
	var ts []int64
	for i := range h.rows {
		if h.changed[i] {
			names, keys, shards = append(names, h.rows[i].limit.name), append(keys, h.rows[i].key), append(shards, h.rows[i].shard)
			values, ts = append(values, h.states[i].Value), append(ts, h.states[i].TS)
		}
	}
	if len(names) > 0 {
		batch.Queue(l.statements.save, names, keys, shards, values, ts)
	}
}

// queueUnmake queues the deletion of the rows that were made for nothing, if there are any.
func (l *Limiter) queueUnmake(batch *pgx.Batch, h *held) {
	var names, keys []string
	var shards []int32
	for i := range h.rows {
		if h.made[i] && !h.changed[i] {
			names, keys, shards = append(names, h.rows[i].limit.name), append(keys, h.rows[i].key), append(shards, h.rows[i].shard)
		}
	}
	if len(names) > 0 {
		batch.Queue(l.statements.unmake, names, keys, shards)
	}
}

// takeHeld decides on the call p by locking all of its rows, on l, which must be bound to a transaction. A
// refusal leaves none of them locked, and none that it made, unless there was a clock to be mended.
func (l *Limiter) takeHeld(ctx context.Context, p *plan) ([]answer, error) {
	batch := &pgx.Batch{}
	batch.Queue("SAVEPOINT " + savepoint)
	h, err := l.holdAfter(ctx, batch, p)
	if err != nil {
		return nil, err
	}
	answers := h.take(p)
	if allAllowed(answers) || slices.Contains(h.changed, true) {
		return answers, l.saveHeld(ctx, h)
	}
	return answers, l.undo(ctx)
}

// of sets what the bucket holds after the decision: the state of its row, or those of all its rows.
func (a *answer) of(b *ask, states []bucket.State) {
	if !b.sharded() {
		a.state = states[0]
		return
	}
	a.rows = states
	a.state = bucket.State{Value: b.terms.TokensOf(states, a.now), TS: b.terms.Begin(a.now)}
}

// fillHeld is fill by locking all rows, on l, which must be bound to a transaction.
func (l *Limiter) fillHeld(ctx context.Context, p *plan) error {
	h, err := l.hold(ctx, p)
	if err != nil {
		return err
	}
	for i := range h.rows {
		t := h.rows[i].terms
		h.states[i] = bucket.State{Value: t.Capacity, TS: max(t.FixClock(h.states[i], h.now).TS, t.Begin(h.now))}
		h.changed[i] = true
	}
	return l.saveHeld(ctx, h)
}

// chargeHeld is charge by locking all rows, on l, which must be bound to a transaction.
func (l *Limiter) chargeHeld(ctx context.Context, p *plan, amounts []float64, until []int64) error {
	h, err := l.hold(ctx, p)
	if err != nil {
		return err
	}
	for i := range p.buckets {
		h.charge(&p.buckets[i], amounts[i], until[i])
	}
	return l.saveHeld(ctx, h)
}
