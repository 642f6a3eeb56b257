package ratelimit

import (
	"math"
	"time"
)

// maxShards bounds the rows of one bucket: a call that finds one of them short locks them all. A power of
// two, as every number of shards, so that the part of each is exact.
const maxShards = 64

// part returns the terms of one of the rows a bucket is spread over.
func (t terms) part() terms {
	n := float64(max(t.shards, 1))
	t.capacity, t.rate, t.maxDebt, t.shards = t.capacity/n, t.rate/n, t.maxDebt/n, 1
	return t
}

// sharded reports whether the bucket is spread over several rows.
func (b *ask) sharded() bool { return b.terms.shards > 1 }

// row returns the bucket as it is to one of its rows; the cost is left to the caller.
func (b *ask) row(shard int32) ask {
	r := *b
	r.shard, r.terms, r.cost, r.lowest = shard, b.terms.part(), 0, 0
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
		for shard := range p.buckets[i].terms.shards {
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
		shards[i] = p.buckets[i].terms.shards
	}
	return shards
}

// takeParts is take on the rows of one bucket: it takes from all of them together, and evens them out. When
// they do not hold enough they stay as they are.
func (t terms) takeParts(parts []state, now int64, cost, lowest float64) bool {
	if len(parts) == 1 {
		next, allowed := t.take(parts[0], now, cost, lowest)
		parts[0] = next
		return allowed
	}
	left := t.tokensOf(parts, now) - cost
	if !(left >= lowest) {
		return false
	}
	t.level(parts, now, left)
	return true
}

// chargeParts takes amount from the rows of a bucket whatever they hold.
func (t terms) chargeParts(parts []state, now int64, amount float64) {
	t.level(parts, now, t.tokensOf(parts, now)-amount)
}

// creditParts gives amount back to the rows of a bucket, and fills them to the capacity, or to most together where
// that is more. As in buckets_charge.sql it credits no time, so ts stays as it is. Of several rows it prefers those
// that are not full now: one that is full would gain nothing from it.
func (t terms) creditParts(parts []state, now int64, amount, most float64) {
	part, n := t.part(), float64(len(parts))
	most = max(part.capacity, most/n)
	for i := range parts {
		parts[i] = part.mend(parts[i], now)
	}
	if len(parts) == 1 {
		parts[0].value = min(max(most, parts[0].value), parts[0].value+amount)
		return
	}
	for _, capacity := range []float64{part.capacity, most} {
		part.capacity = capacity
		for _, share := range []float64{amount / n, amount} { // evenly, and then what the full ones left
			for i, s := range parts {
				given := min(share, amount, max(0, capacity-part.tokens(s, now)))
				parts[i].value = min(max(capacity, s.value), s.value+given)
				amount -= given
			}
		}
	}
}

// level sets the rows of a bucket so that together they hold tokens at now, each the same.
func (t terms) level(parts []state, now int64, tokens float64) {
	part, each := t.part(), tokens/float64(len(parts))
	for i, s := range parts {
		parts[i] = state{value: each, ts: max(part.mend(s, now).ts, part.begin(now))}
	}
}

// tokensOf returns what the rows of a bucket hold together.
func (t terms) tokensOf(parts []state, now int64) float64 {
	part := t.part()
	return sum(parts, func(s state) float64 { return part.tokens(part.mend(s, now), now) })
}

// mendParts is mend for the rows of a bucket.
func (t terms) mendParts(parts []state, now int64) []state {
	part, mended := t.part(), make([]state, len(parts))
	for i, s := range parts {
		mended[i] = part.mend(s, now)
	}
	return mended
}

// sum adds up what of returns for each row, pair by pair, so that rows which are even, as those of a full
// bucket, add up to the whole without a rounding.
func sum(parts []state, of func(state) float64) float64 {
	if len(parts) == 1 {
		return of(parts[0])
	}
	half := len(parts) / 2
	return sum(parts[:half], of) + sum(parts[half:], of)
}

// waitOf is wait for the rows of a bucket: they fill at their own pace, so one that is full adds nothing to
// the sum any more.
func (t terms) waitOf(parts []state, now int64, cost, lowest float64) time.Duration {
	parts = t.mendParts(parts, now)
	begin := t.begin(now)
	enough := func(n int64) bool { return t.tokensOf(parts, begin+n*t.step)-cost >= lowest }
	if enough(0) {
		return 0
	}
	limit := horizon/t.step + 2
	n := first(t.stepsUntil(parts, begin, cost+lowest, limit), limit, enough)
	return time.Duration(min(begin+n*t.step-now, horizon)) * time.Microsecond
}

// stepsUntil returns about how many steps after begin the rows hold tokens together, at most limit: what is
// missing comes at the pace of the rows that are not full, until one more of them is.
func (t terms) stepsUntil(parts []state, begin int64, tokens float64, limit int64) (n int64) {
	part := t.part()
	for range parts {
		at, filling := begin+n*t.step, 0.0
		for _, s := range parts {
			if part.tokens(s, at) < part.capacity {
				filling++
			}
		}
		missing := tokens - t.tokensOf(parts, at)
		if missing <= 0 || filling == 0 {
			break
		}
		n = int64(min(float64(n)+math.Ceil(missing*t.steps/(part.rate*filling)), float64(limit)))
	}
	return n
}
