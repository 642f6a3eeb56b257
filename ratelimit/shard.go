package ratelimit

import (
	"context"
	"math/rand/v2"
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

// parted reports whether the bucket is spread over several rows.
func (b *bucket) parted() bool { return b.terms.shards > 1 }

// row returns the bucket as it is to one of its rows; the cost is left to the caller.
func (b *bucket) row(shard int32) bucket {
	r := *b
	r.shard, r.terms, r.cost, r.lowest = shard, b.terms.part(), 0, 0
	return r
}

// which names the row.
func (b *bucket) which() which { return which{b.limit.name, b.key, b.shard} }

// parted reports whether a bucket of the plan is spread over several rows.
func (p *plan) parted() bool {
	for i := range p.buckets {
		if p.buckets[i].parted() {
			return true
		}
	}
	return false
}

// rows returns every row of the plan's buckets, in the order of locking. Those of the i-th bucket begin at
// the index from[i].
func (p *plan) rows() (rows []bucket, from []int) {
	rows, from = make([]bucket, 0, len(p.buckets)), make([]int, len(p.buckets))
	for i := range p.buckets {
		from[i] = len(rows)
		if !p.buckets[i].parted() {
			rows = append(rows, p.buckets[i])
			continue
		}
		for shard := range p.buckets[i].terms.shards {
			rows = append(rows, p.buckets[i].row(shard))
		}
	}
	return rows, from
}

// scatter returns the plan with one row in place of each bucket that is spread over several: another than
// in the last attempt, nil at the first. It returns nil when a row could never hold what is asked, or may not
// owe it: then the rows together have to be asked.
func (p *plan) scatter(last *plan) *plan {
	s := &plan{buckets: make([]bucket, len(p.buckets)), asked: p.asked}
	for i := range p.buckets {
		b := &p.buckets[i]
		s.buckets[i] = *b
		if !b.parted() {
			continue
		}
		var shard int32
		if last == nil {
			shard = rand.N(b.terms.shards)
		} else {
			shard = (last.buckets[i].shard + 1 + rand.N(b.terms.shards-1)) % b.terms.shards
		}
		row := b.row(shard)
		row.cost = b.cost
		if b.lowest != 0 || row.cost > row.terms.capacity {
			return nil
		}
		s.buckets[i] = row
	}
	return s
}

// takeParts is take on the rows of one bucket: it takes from all of them together, and evens them out. When
// they do not hold enough they stay as they are.
func (t terms) takeParts(parts []state, now int64, cost, lowest float64) bool {
	if len(parts) == 1 {
		next, allowed := t.take(parts[0], now, cost, lowest)
		parts[0] = next
		return allowed
	}
	sum := t.tokensOf(parts, now)
	if !(sum-cost >= lowest) {
		return false
	}
	t.level(parts, now, sum-cost)
	return true
}

// level sets the rows of a bucket so that together they hold sum at now, each the same.
func (t terms) level(parts []state, now int64, sum float64) {
	part, each := t.part(), sum/float64(len(parts))
	for i, s := range parts {
		s = part.mend(s, now)
		parts[i] = state{value: each, ts: max(s.ts, part.begin(now))}
	}
}

// tokensOf returns what the rows of a bucket hold together.
func (t terms) tokensOf(parts []state, now int64) float64 {
	part, sum := t.part(), 0.0
	for _, s := range parts {
		sum += part.tokens(part.mend(s, now), now)
	}
	return sum
}

// waitOf is wait for the rows of a bucket: they fill at their own pace, so one that is full adds nothing to
// the sum any more.
func (t terms) waitOf(parts []state, now int64, cost, lowest float64) time.Duration {
	part := t.part()
	begin := part.begin(now)
	enough := func(n int64) bool {
		sum := 0.0
		for _, s := range parts {
			sum += part.tokens(part.mend(s, now), begin+n*t.step)
		}
		return sum-cost >= lowest
	}
	if enough(0) {
		return 0
	}
	limit := horizon/t.step + 2
	n := first(1, limit, enough)
	return time.Duration(min(begin+n*t.step-now, horizon)) * time.Microsecond
}

// short reports whether the answers for one row of each bucket leave the decision open: one that is spread
// over several refused, and none that is not.
func (p *plan) short(answers []answer) bool {
	short := false
	for i, a := range answers {
		if !a.allowed && !p.buckets[i].parted() {
			return false
		}
		short = short || !a.allowed
	}
	return short
}

// complete turns the answers for one row of each bucket of p into answers for the buckets: it reads their
// other rows. In a SERIALIZABLE transaction these stay unread, and each is taken to hold as much as the one
// that was asked.
func (l *Limiter) complete(ctx context.Context, p, rows *plan, answers []answer) ([]answer, error) {
	all, from := p.rows()
	found, err := l.readRows(ctx, l.statements.look, all)
	if err != nil {
		return nil, err
	}
	for i := range p.buckets {
		b, shard := &p.buckets[i], int(rows.buckets[i].shard)
		if !b.parted() {
			continue
		}
		parts := make([]state, b.terms.shards)
		for j := range parts {
			parts[j] = answers[i].state
			if len(found) > 0 && j != shard {
				parts[j] = found[from[i]+j].state
			}
		}
		answers[i].of(b, parts)
	}
	return answers, nil
}

// shards returns the number of rows of each bucket, none when all of them are one row.
func (p *plan) shards() []int32 {
	if !p.parted() {
		return []int32{}
	}
	shards := make([]int32, len(p.buckets))
	for i := range p.buckets {
		shards[i] = p.buckets[i].terms.shards
	}
	return shards
}
