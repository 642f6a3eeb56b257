package ratelimit

import (
	"slices"

	"github.com/jackc/pgx/v5"
)

// lineup are the calls of a flight for one bucket that no other call of it asks for together with another.
type lineup struct {
	bucket bucket // with what the calls ask for together
	calls  []*call
	answer answer
	found  bool // whether the answer is there: no row of the bucket may have been
}

// line arranges the calls of a flight: those whose bucket can be asked for the sum of their costs, by
// bucket in the order of locking, those of one name under one policy; and the others.
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
	kept := lineups[:0]
	for _, at := range lineups {
		if n := len(kept); !at.aim() || n > 0 && kept[n-1].conflicts(at) {
			others = append(others, at.calls...)
			continue
		}
		kept = append(kept, at)
	}
	slices.SortFunc(others, bySeat)
	return kept, others
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

// conflicts reports whether two lineups are of one name under two policies, which differ in more than where
// their windows begin.
func (at *lineup) conflicts(o *lineup) bool {
	a, b := at.bucket.terms, o.bucket.terms
	a.phase, b.phase = 0, 0
	return at.bucket.limit.name == o.bucket.limit.name && a != b
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

// finish answers the calls of the lineup that can be answered, and returns the others.
func (at *lineup) finish() (open []*call) {
	a, rest := at.answer, at.calls
	if a.allowed {
		sum, n := 0.0, 0
		for sum < at.bucket.cost {
			sum += at.calls[n].plan.buckets[0].cost
			n++
		}
		for i := n - 1; i >= 0; i-- { // the state after each is that after the next, without what that took
			at.calls[i].one[0] = a
			a.state.value += at.calls[i].plan.buckets[0].cost
		}
		for _, c := range at.calls[:n] {
			c.answers = c.one[:]
			c.finish(nil)
		}
		a, rest = at.answer, at.calls[n:]
		a.allowed = false
	}
	for i, c := range rest {
		b := &c.plan.buckets[0]
		if !at.found || b.terms.ahead(a.state, a.now) || b.overtaken(a) {
			return rest[i:] // those behind it too: what it takes is missing when it is their turn
		}
		c.one[0] = a
		c.answers = c.one[:]
		c.finish(nil)
	}
	return nil
}
