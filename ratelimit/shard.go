package ratelimit

// sharded reports whether the bucket is spread over several rows.
func (b *ask) sharded() bool { return b.terms.Shards > 1 }

// row returns the bucket as it is to one of its rows; the cost is left to the caller.
func (b *ask) row(shard int32) ask {
	r := *b
	r.shard, r.terms, r.cost, r.lowest = shard, b.terms.OfShard(), 0, 0
	return r
}

// sharded reports whether a bucket of the plan is spread over several rows.
func (p *plan) sharded() bool {
	for i := range p.buckets {
		if p.buckets[i].sharded() {
			return true
		}
	}
	return false
}

// rows returns every row of the plan's buckets, in the order of locking. Those of the i-th bucket begin at
// the index from[i].
func (p *plan) rows() (rows []ask, from []int) {
	rows, from = make([]ask, 0, len(p.buckets)), make([]int, len(p.buckets))
	for i := range p.buckets {
		from[i] = len(rows)
		if !p.buckets[i].sharded() {
			rows = append(rows, p.buckets[i])
			continue
		}
		for shard := range p.buckets[i].terms.Shards {
			rows = append(rows, p.buckets[i].row(shard))
		}
	}
	return rows, from
}

// shards returns the number of rows of each bucket, none when all of them are one row.
func (p *plan) shards() []int32 {
	if !p.sharded() {
		return []int32{}
	}
	shards := make([]int32, len(p.buckets))
	for i := range p.buckets {
		shards[i] = p.buckets[i].terms.Shards
	}
	return shards
}
