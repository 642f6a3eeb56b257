package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// group are the calls of a batch for one bucket that no other call of it asks for together with another.
type group struct {
	whole  ask
	bucket ask // with what the calls ask for together: the whole, or one of the rows it is spread over
	calls  []*call
	answer answer
	found  bool           // whether the answer is there: another may have been quicker
	tried  int32          // rows of the bucket that were held
	states []bucket.State // the rows of a bucket that is spread over several
}

// groupByKey arranges the calls of a batch: those whose bucket can be asked for the sum of their costs, by
// bucket in the order of locking, those of one name under one policy; and the others.
func groupByKey(calls []*call) (groups []*group, others []*call) {
	shared := make(map[bucket.Key]bool) // with calls that need more than one bucket, or may owe
	byBucket := make(map[bucket.Key]*group, len(calls))
	for i, c := range calls {
		c.seq = i
		if !c.look && !c.simple() {
			for j := range c.plan.buckets {
				shared[c.plan.buckets[j].bucketKey()] = true
			}
		}
	}
	for _, c := range calls {
		b := &c.plan.buckets[0]
		if c.look || !c.simple() || shared[b.bucketKey()] {
			others = append(others, c)
			continue
		}
		at := byBucket[b.bucketKey()]
		if at == nil {
			at = newGroup(b)
			byBucket[b.bucketKey()] = at
			groups = append(groups, at)
		}
		if at.whole.terms != b.terms {
			others = append(others, c)
			continue
		}
		at.calls = append(at.calls, c)
	}
	slices.SortFunc(groups, func(a, b *group) int { return a.bucket.rowKey().Compare(b.bucket.rowKey()) })
	kept := groups[:0]
	for _, at := range groups {
		if n := len(kept); !at.sumCosts() || n > 0 && kept[n-1].conflicts(at) {
			others = append(others, at.calls...)
			continue
		}
		kept = append(kept, at)
	}
	slices.SortFunc(others, bySeq)
	return kept, others
}

// newGroup returns a group for the bucket, or for one of its rows, any of them.
func newGroup(b *ask) *group {
	at := &group{whole: *b, bucket: *b}
	if b.sharded() {
		at.bucket = b.row(rand.N(b.terms.Shards))
	}
	return at
}

// simple reports whether c asks for one bucket, without owing.
func (c *call) simple() bool {
	b := &c.plan.buckets[0]
	return len(c.plan.buckets) == 1 && !c.reserve && b.cost > 0
}

// sumCosts sets how much the group asks for: what as many of its calls cost as the row may hold at most. It
// returns false when that is none, or when the statement could not tell that amount to the last bit, as it gets to know it as what
// is missing from a full bucket.
func (at *group) sumCosts() bool {
	capacity, sum := at.bucket.terms.Capacity, 0.0
	for _, c := range at.calls {
		if next := sum + c.plan.buckets[0].cost; next <= capacity {
			sum = next
		} else {
			break
		}
	}
	at.bucket.cost = sum
	return sum > 0 && capacity-(capacity-sum) == sum
}

// conflicts reports whether two groups are of one name under two policies, which differ in more than where
// their windows begin.
func (at *group) conflicts(o *group) bool {
	a, b := at.bucket.terms, o.bucket.terms
	a.Phase, b.Phase = 0, 0
	return at.bucket.limit.name == o.bucket.limit.name && a != b
}

// isHeld reports whether somebody holds the row that the group asked for, or was quicker: it has enough and did not
// give.
func (at *group) isHeld() bool {
	return !at.found || !at.answer.allowed && at.bucket.overtaken(at.answer)
}

// nextRow has the group ask another row of its bucket when somebody holds the one it asked, and reports whether
// there is one that was not asked yet.
func (at *group) nextRow() bool {
	n := at.whole.terms.Shards
	if !at.isHeld() || at.tried+1 >= n {
		return false
	}
	at.tried++
	at.bucket = at.whole.row((at.bucket.shard + 1) % n)
	return at.sumCosts()
}

// spendOne asks for what the calls for one bucket want, and waits for its row, as it holds none meanwhile: that of
// waitFor where the bucket is spread over several.
func (l *Limiter) spendOne(ctx context.Context, at *group, waitFor *bucket.Key) error {
	batch := &pgx.Batch{}
	if at.whole.sharded() {
		at.bucket = at.whole.row(waitFor.Shard)
		at.sumCosts()
	}
	batch.Queue(l.statements.takeAlone, l.parameters(&at.bucket)...)
	if at.whole.sharded() {
		l.queueRead(batch, at.rows())
	}
	return l.send(ctx, batch, func(results pgx.BatchResults) error {
		rows, err := results.Query()
		if err != nil {
			return err
		}
		answers, err := scan(rows)
		if err != nil {
			return err
		}
		if at.found = len(answers) == 1; at.found {
			at.answer = answers[0]
		}
		if at.isHeld() {
			return errOvertaken
		}
		if at.whole.sharded() {
			return l.receiveRead(results, at.rows(), nil, nil, []*group{at})
		}
		return nil
	})
}

// rows returns the rows of the group's bucket.
func (at *group) rows() []ask {
	all, _ := (&plan{buckets: []ask{at.whole}}).rows()
	return all
}

// spend asks for what the groups want and looks at what the others are about, in one round trip.
func (l *Limiter) spend(ctx context.Context, groups []*group, others []*call, looked [][]answer) error {
	batch := &pgx.Batch{}
	limits := byLimit(groups)
	for _, ofLimit := range limits {
		l.queueSpend(batch, ofLimit)
	}
	var rows []ask
	for _, c := range others {
		all, _ := c.plan.rows()
		rows = append(rows, all...)
	}
	for _, at := range groups { // behind what was taken, so that it shows
		if at.whole.sharded() {
			rows = append(rows, at.rows()...)
		}
	}
	if len(rows) > 0 {
		l.queueRead(batch, rows)
	}
	return l.send(ctx, batch, func(results pgx.BatchResults) error {
		for _, ofLimit := range limits {
			if err := receiveSpend(results, ofLimit); err != nil {
				return &boundError{err, rowsOf(groups)}
			}
		}
		if len(rows) == 0 {
			return nil
		}
		return l.receiveRead(results, rows, others, looked, groups)
	})
}

// byLimit returns the groups of each limit, which are sorted by it.
func byLimit(groups []*group) (limits [][]*group) {
	for rest := groups; len(rest) > 0; {
		n := 1
		for n < len(rest) && rest[n].bucket.limit.name == rest[0].bucket.limit.name {
			n++
		}
		limits, rest = append(limits, rest[:n]), rest[n:]
	}
	return limits
}

// rowsOf returns the rows that the groups ask.
func rowsOf(groups []*group) []ask {
	rows := make([]ask, len(groups))
	for i, at := range groups {
		rows[i] = at.bucket
	}
	return rows
}

// queueRead queues a look at rows.
func (l *Limiter) queueRead(batch *pgx.Batch, rows []ask) {
	c := (&plan{buckets: rows}).columns()
	batch.Queue(l.statements.read, c.names, c.keys, c.shards, l.asOf())
}

// receiveRead distributes the answers to a look at the rows of others, and then those of the groups whose buckets
// are spread over several.
func (l *Limiter) receiveRead(results pgx.BatchResults, rows []ask, others []*call, looked [][]answer, groups []*group) error {
	found, err := results.Query()
	if err != nil {
		return err
	}
	answers, err := scanRows(found, rows)
	if err != nil {
		return err
	}
	if len(answers) != len(rows) {
		return fmt.Errorf("the statement answered for %d of %d rows", len(answers), len(rows))
	}
	for i, c := range others {
		looked[i], answers = c.plan.gather(answers)
	}
	for _, at := range groups {
		if at.whole.sharded() {
			n := at.whole.terms.Shards
			at.states, answers = states(answers[:n]), answers[n:]
		}
	}
	return nil
}

// queueSpend queues the statement for the groups of one limit.
func (l *Limiter) queueSpend(batch *pgx.Batch, group []*group) {
	n := len(group)
	keys, shards, costs, phases := make([]string, n), make([]int32, n), make([]float64, n), make([]int64, n)
	for i, at := range group {
		b := &at.bucket
		keys[i], shards[i], costs[i], phases[i] = b.key, b.shard, b.cost, b.terms.Phase
	}
	t := group[0].bucket.terms
	batch.Queue(l.statements.spend, group[0].bucket.limit.name, keys, shards, costs,
		t.Capacity, t.Rate, t.Step, t.Steps, phases, l.asOf(), t.Tolerance())
}

// receiveSpend gives each group of a limit its answer. Answers come in the order asked, but for those that
// are left out and, behind the others, those that are refusals.
func receiveSpend(results pgx.BatchResults, group []*group) error {
	for _, at := range group { // of an attempt before
		at.answer, at.found = answer{}, false
	}
	rows, err := results.Query()
	if err != nil {
		return err
	}
	var key string
	var shard int32
	var a answer
	next := 0
	_, err = pgx.ForEachRow(rows, []any{&key, &shard, &a.allowed, &a.state.Value, &a.state.TS, &a.now}, func() error {
		for range group {
			at := group[next%len(group)]
			next++
			if at.bucket.key == key && at.bucket.shard == shard {
				at.answer, at.found = a, true
				return nil
			}
		}
		return errors.New("the statement answered for a bucket that was not asked for")
	})
	return err
}

// answerCalls answers the calls of the group that can be answered, and returns the others.
func (at *group) answerCalls() (open []*call) {
	a, rest := at.answer, at.calls
	if a.allowed {
		sum, n := 0.0, 0
		for sum < at.bucket.cost {
			sum += at.calls[n].plan.buckets[0].cost
			n++
		}
		for i := n - 1; i >= 0; i-- { // the state after each is that after the next, without what that took
			at.setAnswer(at.calls[i], a)
			a.state.Value += at.calls[i].plan.buckets[0].cost
		}
		for _, c := range at.calls[:n] {
			c.Answer(nil)
		}
		a, rest = at.answer, at.calls[n:]
		a.allowed = false
	}
	for i, c := range rest {
		b := &c.plan.buckets[0]
		if at.setAnswer(c, a); !at.found || len(b.fromFuture(c.answers[0])) > 0 || b.overtaken(c.answers[0]) {
			return rest[i:] // those behind it too: what it takes is missing when it is their turn
		}
		c.Answer(nil)
	}
	return nil
}

// setAnswer sets the answer to a call of the group, from that for its row.
func (at *group) setAnswer(c *call, a answer) {
	c.answers = c.one[:]
	c.one[0] = a
	if at.whole.sharded() && at.found {
		rows := slices.Clone(at.states)
		if a.allowed || at.answer.allowed {
			rows[at.bucket.shard] = a.state
		}
		c.one[0].of(&at.whole, rows)
	}
}
