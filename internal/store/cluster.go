package store

import (
	"slices"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// cluster are calls of a batch that buckets connect: each asks for one that another of them asks for, too, or is the only
// one. They get all that they cost at once, or nothing until they are decided one after the other.
type cluster struct {
	calls []*Call // in the order of arrival
	given bool
}

// clusters are the clusters of a batch, and the rows that they ask for.
type clusters struct {
	of    []*cluster
	calls []clustered
	rows  []clusterRow // in the order of locking

	failed bool // whether the statement for them did, last
}

// clustered is a call, with the cluster that it is in.
type clustered struct {
	*Call
	cluster *cluster
	rows    []*clusterRow // of its asks, one for each
}

// clusterRow is a row, with what the calls of its cluster ask of it together.
type clusterRow struct {
	ask     *bucket.Ask // of the first of them
	cost    float64
	lowest  float64
	cluster int // the place of a call of it, and in the end that of the cluster

	enough bool
	found  bucket.Answer
}

// isClustered reports whether a statement can decide on the call together with those that it shares buckets with.
func (c *Call) isClustered() bool {
	return c.way == byStatement && c.traits.Statement == bucket.StepStatement
}

// clustersOf puts together calls that can be decided so, and returns the others: those too that share a bucket with one
// which cannot, or with one that has another policy for it, as they are answered in turn.
func clustersOf(calls []*Call) (cs *clusters, others []*Call) {
	b := newClusterBuilder(calls)
	if b == nil {
		return nil, calls
	}
	for _, c := range calls {
		if !c.Look && !c.isClustered() {
			b.leaveOut(c)
		}
	}
	return b.build(calls)
}

// clusterBuilder finds which calls are connected. Of the calls of a cluster, each but the first points at an earlier one.
type clusterBuilder struct {
	calls   []clustered
	rows    []clusterRow
	byKey   map[bucket.Key]int // their places
	pointer []int              // of each call; that of the first of a cluster is its own place
	apart   []bool             // of the first call of a cluster: whether its calls are decided in turn
}

// newClusterBuilder returns a builder that has connected the calls that can be, or nil where there are none.
func newClusterBuilder(calls []*Call) *clusterBuilder {
	n, asks := 0, 0
	for _, c := range calls {
		if c.isClustered() {
			n, asks = n+1, asks+len(c.Asks)
		}
	}
	if n == 0 {
		return nil
	}
	b := &clusterBuilder{
		calls: make([]clustered, 0, n), rows: make([]clusterRow, 0, asks), byKey: make(map[bucket.Key]int, asks),
		pointer: make([]int, n), apart: make([]bool, n),
	}
	for _, c := range calls {
		if c.isClustered() {
			b.add(c)
		}
	}
	return b
}

// add adds a call, and connects it with those that ask for one of its buckets.
func (b *clusterBuilder) add(c *Call) {
	place := len(b.calls)
	b.calls, b.pointer[place] = append(b.calls, clustered{Call: c}), place
	for i := range c.takes {
		a := &c.takes[i]
		at, known := b.byKey[a.Key]
		if !known {
			b.byKey[a.Key] = len(b.rows)
			b.rows = append(b.rows, clusterRow{ask: a, cost: a.Cost, lowest: a.Lowest, cluster: place})
			continue
		}
		r := &b.rows[at]
		first := b.connect(r.cluster, place)
		b.apart[first] = b.apart[first] || r.ask.Terms != a.Terms
		r.cost, r.lowest = r.cost+a.Cost, max(r.lowest, a.Lowest)
	}
}

// first returns the first call of the cluster that a call is in.
func (b *clusterBuilder) first(place int) int {
	for b.pointer[place] != place {
		b.pointer[place] = b.pointer[b.pointer[place]]
		place = b.pointer[place]
	}
	return place
}

// connect makes one of the clusters of two calls.
func (b *clusterBuilder) connect(one, other int) (first int) {
	one, other = b.first(one), b.first(other)
	first = min(one, other)
	b.pointer[max(one, other)] = first
	b.apart[first] = b.apart[one] || b.apart[other]
	return first
}

// leaveOut has the clusters decided in turn that share a bucket with c.
func (b *clusterBuilder) leaveOut(c *Call) {
	for i := range c.Asks {
		if at, known := b.byKey[c.Asks[i].Key]; known {
			b.apart[b.first(b.rows[at].cluster)] = true
		}
	}
}

// build returns the clusters, nil where there are none, and those of the calls that are in none.
func (b *clusterBuilder) build(calls []*Call) (cs *clusters, others []*Call) {
	cs = &clusters{}
	places := make([]int, len(b.calls)) // of the clusters, by their first calls
	next := 0
	for _, c := range calls {
		place := next
		if place < len(b.calls) && b.calls[place].Call == c {
			next++
		} else {
			others = append(others, c)
			continue
		}
		first := b.first(place)
		switch {
		case b.apart[first]:
			others = append(others, c)
			continue
		case first == place:
			places[first] = len(cs.of)
			cs.of = append(cs.of, &cluster{})
		}
		at := cs.of[places[first]]
		at.calls = append(at.calls, c)
		b.calls[place].cluster = at
	}
	if len(cs.of) == 0 {
		return nil, others
	}
	b.hand(cs, places)
	return cs, others
}

// hand gives cs the rows of its calls, sorted, and these their rows.
func (b *clusterBuilder) hand(cs *clusters, places []int) {
	cs.calls = slices.DeleteFunc(b.calls, func(c clustered) bool { return c.cluster == nil })
	rows := slices.DeleteFunc(b.rows, func(r clusterRow) bool { return b.apart[b.first(r.cluster)] })
	for i := range rows {
		rows[i].cluster = places[b.first(rows[i].cluster)]
	}
	slices.SortFunc(rows, func(r, o clusterRow) int { return r.ask.Key.Compare(o.ask.Key) })
	for i := range rows {
		b.byKey[rows[i].ask.Key] = i
	}
	cs.rows = rows
	for i := range cs.calls {
		c := &cs.calls[i]
		c.rows = make([]*clusterRow, len(c.takes))
		for j := range c.takes {
			c.rows[j] = &rows[b.byKey[c.takes[j].Key]]
		}
	}
}

// setAnswers sets the answers to the calls: where their cluster was given what it wants, as after each of them; else what
// was found.
func (cs *clusters) setAnswers() {
	for i := len(cs.calls) - 1; i >= 0; i-- { // the state after each is that after the next, without what that took
		c := &cs.calls[i]
		answers := c.one[:]
		if len(c.Asks) != 1 {
			answers = make([]bucket.Answer, len(c.Asks))
		}
		for j, r := range c.rows {
			if answers[j] = r.found; c.cluster.given {
				c.takes[j].Untake(&r.found, c.takes[j].Cost)
			}
		}
		switch c.Answers = answers; {
		case c.cluster.given:
			c.fromRows()
		case c.traits.Sharded:
			c.way = byLooking // other rows may have tokens
		default:
			c.Answers = bucket.LookAt(c.Asks, answers, answers)
		}
	}
}

// answerGiven answers the calls of the clusters that were given what they want, and returns the others.
func (cs *clusters) answerGiven() (open []*Call) {
	for _, of := range cs.of {
		if !of.given {
			open = append(open, of.calls...)
			continue
		}
		for _, c := range of.calls {
			c.Answer(nil)
		}
	}
	return open
}
