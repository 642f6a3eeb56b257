package store

import (
	"slices"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// group are the calls of a batch for one bucket that no other call of it asks for together with another.
type group struct {
	row    bucket.Ask // with what the calls ask for together
	calls  []*Call
	first  [1]*Call // the room for them when there is one, as there mostly is
	answer bucket.Answer
	found  bool  // whether the answer is there: another may have been quicker
	absent bool  // whether there is none because other terms may hold
	tried  int32 // rows of the bucket that were held
}

// maxStatements bounds the statements of a batch, each of which takes under one policy of one limit. Calls under more of
// them are decided on locked rows.
const maxStatements = 32

// groupByKey puts together the calls of a batch whose costs can be asked for as one sum: a group for each bucket, in the
// order of locking. It returns the other calls, too.
func groupByKey(calls []*Call) (groups []*group, others []*Call) {
	shared := make(map[bucket.Key]bool) // with calls that need more than one bucket, or may owe
	byBucket := make(map[bucket.Key]*group, len(calls))
	for i, c := range calls {
		c.seq = i
		if !c.Look && !c.canBeSummed() {
			for j := range c.Asks {
				shared[c.Asks[j].Key] = true
			}
		}
	}
	var room []group
	for _, c := range calls {
		a := &c.takes[0]
		if c.Look || !c.canBeSummed() || shared[a.Key.Whole()] {
			others = append(others, c)
			continue
		}
		g := byBucket[a.Key]
		if g == nil {
			if len(room) == cap(room) { // for more at once the more there are, as they may also be for one bucket
				room = make([]group, 0, min(len(groups)+1, 16))
			}
			room = room[:len(room)+1]
			g = &room[len(room)-1]
			g.row, g.calls = *a, g.first[:0]
			byBucket[a.Key] = g
			groups = append(groups, g)
		}
		if len(g.calls) > 0 && g.calls[0].Asks[0].Terms != c.Asks[0].Terms {
			others = append(others, c)
			continue
		}
		g.calls = append(g.calls, c)
	}
	slices.SortFunc(groups, func(a, b *group) int { return a.row.Key.Compare(b.row.Key) })
	kept := groups[:0]
	for _, g := range groups {
		if g.sumCosts() {
			kept = append(kept, g)
		} else {
			others = append(others, g.calls...)
		}
	}
	if policies := byPolicy(kept); len(policies) > maxStatements {
		for _, g := range policies[maxStatements] {
			others = append(others, g.calls...)
		}
		kept = slices.Concat(policies[:maxStatements]...)
	}
	slices.SortFunc(others, bySeq)
	return kept, others
}

// canBeSummed reports whether a statement can take what the call costs together with what others cost.
func (c *Call) canBeSummed() bool {
	return c.way == byStatement && c.takesFromOne()
}

// sumCosts sets how much the group asks for: what as many of its calls cost as the row may hold at most. It
// returns false when that is none, or when the statement could not tell that amount to the last bit, as it gets to know it as what
// is missing from a full bucket, unless that is a sliding window.
func (g *group) sumCosts() bool {
	capacity, sum := g.row.Terms.Capacity, 0.0
	for _, c := range g.calls {
		next := sum + c.Asks[0].Cost
		if next > capacity {
			break
		}
		sum = next
	}
	g.row.Cost = sum
	return sum > 0 && (slides(&g.row) || capacity-(capacity-sum) == sum)
}

// isUnder reports whether two groups are of one limit under one policy, which may differ in where their windows begin.
func (g *group) isUnder(o *group) bool {
	a, b := g.row.Terms, o.row.Terms
	a.Phase, b.Phase, a.Seed, b.Seed = 0, 0, 0, 0
	return g.row.Key.Name == o.row.Key.Name && a == b
}

// isHeld reports whether somebody holds the row that the group asked for, or was quicker: it has enough and did not
// give.
func (g *group) isHeld() bool {
	if g.isOutside() {
		return false
	}
	return !g.found || !g.answer.Allowed && g.row.IsStale(g.answer)
}

// isOutside reports whether the statement did not decide: other terms have to, or Go.
func (g *group) isOutside() bool {
	return g.absent || g.found && g.row.Outside(g.answer)
}

// byPolicy returns the groups of each policy of each limit. Those beyond maxStatements are all in the last.
func byPolicy(groups []*group) (policies [][]*group) {
	if len(groups) > 0 && !slices.ContainsFunc(groups, func(g *group) bool { return !groups[0].isUnder(g) }) {
		return [][]*group{groups} // as mostly
	}
	for _, g := range groups {
		i := len(policies) - 1 // as mostly: groups are sorted by the limit
		for i >= 0 && !policies[i][0].isUnder(g) {
			i--
		}
		switch {
		case i >= 0:
			policies[i] = append(policies[i], g)
		case len(policies) > maxStatements:
			policies[maxStatements] = append(policies[maxStatements], g)
		default:
			policies = append(policies, []*group{g})
		}
	}
	return policies
}

// answerCalls answers the calls of the group that can be answered, and returns the others.
func (g *group) answerCalls() (open []*Call) {
	a, rest := g.answer, g.calls
	if a.Allowed {
		sum, n := 0.0, 0
		for sum < g.row.Cost {
			sum += g.calls[n].Asks[0].Cost
			n++
		}
		for i := n - 1; i >= 0; i-- { // the state after each is that after the next, without what that took
			g.setAnswer(g.calls[i], a)
			g.row.Untake(&a, g.calls[i].Asks[0].Cost)
		}
		for _, c := range g.calls[:n] {
			c.Answer(nil)
		}
		a, rest = g.answer, g.calls[n:]
		a.Allowed = false
	}
	for i, c := range rest {
		ask := &c.takes[0]
		if g.setAnswer(c, a); c.way != byStatement {
			open = append(open, c)
			continue
		}
		if !g.found || g.isOutside() || ask.FromFuture(c.Answers[0]) || ask.IsStale(c.Answers[0]) {
			return rest[i:] // those behind it too: what it takes is missing when it is their turn
		}
		c.Answer(nil)
	}
	return open
}

// setAnswer sets the answer to a call of the group, from that for its row.
func (g *group) setAnswer(c *Call, a bucket.Answer) {
	c.Answers = c.one[:]
	c.one[0] = a
	c.fromRows()
}
