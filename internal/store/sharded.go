package store

import (
	"slices"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// pickRows makes the statement for c take from one row of each bucket that has several. If a row can never hold the cost, c is decided in
// another way.
func (c *Call) pickRows(seed uint64) {
	if !c.traits.Sharded || c.way != byStatement {
		return
	}
	c.takes = slices.Clone(c.Asks)
	for i := range c.takes {
		a, row := &c.Asks[i], &c.takes[i]
		if !a.Sharded() {
			continue
		}
		*row = a.OfShard(int32(seed % uint64(a.Terms.Shards)))
		if row.Cost = a.Cost; row.Cost > row.Terms.Capacity {
			c.way = byLooking
		}
	}
}

// fromRows turns the answers for rows that pickRows has picked into answers for their buckets. If such a row refuses, its bucket may have enough in
// others, and c is decided in another way.
func (c *Call) fromRows() {
	taken := bucket.AllAllowed(c.Answers)
	for i := range c.Asks {
		a, r := &c.Asks[i], &c.Answers[i]
		if !a.Sharded() {
			continue
		}
		if !r.Allowed {
			c.way = byLooking
		}
		*r = c.takes[i].Estimate(*r, a.Terms.Shards, taken)
	}
}

// nextRow has the group ask another row of its bucket when somebody holds the one it asked, and reports whether
// there is one that was not asked yet.
func (g *group) nextRow() bool {
	whole := &g.calls[0].Asks[0]
	n := whole.Terms.Shards
	if !g.isHeld() || g.tried+1 >= n {
		return false
	}
	g.tried++
	g.row = whole.OfShard((g.row.Key.Shard + 1) % n)
	return g.sumCosts()
}
