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

// nextRow makes the next statement for c take from another row of its bucket. If all rows were tried, or the bucket has one row, c is decided in
// another way.
func (c *Call) nextRow() {
	if c.tried++; c.way != byStatement || !c.isSpread() || c.tried >= c.Asks[0].Terms.Shards {
		c.way = byLooking
		return
	}
	c.pickRows(uint64(c.takes[0].Key.Shard) + 1)
}
