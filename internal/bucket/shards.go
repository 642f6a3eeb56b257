package bucket

import (
	"math"
	"slices"
	"time"
)

// MaxShards bounds the rows of one bucket: a call that finds one of them short locks them all. It is a power of
// two, as every number of shards is, so that the share of each row is exact.
const MaxShards = 64

// OfShard returns the terms of one of the rows a bucket is spread over.
func (t Terms) OfShard() Terms {
	n := float64(max(t.Shards, 1))
	t.Capacity, t.Rate, t.MaxDebt, t.Shards = t.Capacity/n, t.Rate/n, t.MaxDebt/n, 1
	t.OfRow = t.Eras != nil
	return t
}

// Sharded reports whether the bucket is spread over several rows.
func (a *Ask) Sharded() bool { return a.Terms.Shards > 1 }

// OfShard returns the ask for one row of the bucket. What it costs is left to the caller.
func (a *Ask) OfShard(shard int32) Ask {
	row := *a
	row.Key.Shard, row.Terms, row.Cost, row.Asked, row.Lowest = shard, a.Terms.OfShard(), 0, 0, 0
	return row
}

// Estimate returns the answer for a bucket of n rows from that for the row of a, as if the other rows held as much as this one did before.
func (a *Ask) Estimate(r Answer, n int32, taken bool) Answer {
	if !taken {
		r.State.Value *= float64(n)
		return r
	}
	before := min(r.State.Value+a.Cost, a.Terms.Capacity)
	r.State.Value = before*float64(n) - a.Cost
	return r
}

// RowCount returns how many rows the ask is about: as many as the bucket ever has, because another era may be in effect.
func (a *Ask) RowCount() int {
	if a.Terms.Eras != nil && !a.Terms.OfRow {
		return int(a.Terms.Eras.rows)
	}
	return int(max(a.Terms.Shards, 1))
}

// SetRows sets what the bucket of the ask holds after the decision: the state of its row, or those of all its rows.
func (r *Answer) SetRows(a *Ask, rows []State) {
	if !a.Sharded() {
		r.State = rows[0]
		return
	}
	r.Rows = slices.Clone(rows) // later calls may change those
	r.State = State{Value: a.Terms.TokensOf(rows, r.Now), TS: a.Terms.Begin(r.Now)}
}

// rows returns the states of the bucket's rows, which are even in an estimate.
func (r *Answer) rows(a *Ask) []State {
	if r.Rows != nil {
		return r.Rows
	}
	row, n := r.State, max(a.Terms.Shards, 1)
	row.Value /= float64(n)
	return slices.Repeat([]State{row}, int(n))
}

// AnySharded reports whether one of the buckets is spread over several rows.
func AnySharded(asks []Ask) bool {
	return anyOf(asks, func(a *Ask) bool { return a.Sharded() })
}

// RowsOf returns the asks for every row of the buckets, in the order of locking.
func RowsOf(asks []Ask) []Ask {
	rows := make([]Ask, 0, len(asks))
	for i := range asks {
		rows = appendRows(rows, &asks[i])
	}
	return rows
}

// appendRows appends the asks for every row of a bucket.
func appendRows(rows []Ask, a *Ask) []Ask {
	n := a.RowCount()
	if n == 1 {
		return append(rows, *a)
	}
	for shard := range n {
		rows = append(rows, a.OfShard(int32(shard)))
	}
	return rows
}

// IsByRow reports whether each row of a bucket can be changed from the terms before to t by itself. A change of the number of rows can
// only reset the bucket. With several rows, Keep cannot raise the capacity: a full row would stay full although its bucket is not.
func (t Terms) IsByRow(change Change, before Terms) bool {
	raised := t.Shards > 1 && t.Capacity > before.Capacity
	return change == Reset || t.Shards == before.Shards && !(change == Keep && raised)
}

// waitFor is Wait for what the answer says of the bucket.
func (t Terms) waitFor(r *Answer, cost, lowest float64) time.Duration {
	if r.Rows != nil {
		return t.WaitOf(r.Rows, r.Now, cost, lowest)
	}
	return t.Wait(r.State, r.Now, cost, lowest)
}

// TakeRows is Take on the rows of one bucket: it takes from all of them together, and evens them out. When
// they do not hold enough they stay as they are.
func (t Terms) TakeRows(rows []State, now int64, cost, lowest float64) bool {
	if len(rows) == 1 {
		next, allowed := t.Take(rows[0], now, cost, lowest)
		rows[0] = next
		return allowed
	}
	left := t.TokensOf(rows, now) - cost
	if !(left >= lowest) {
		return false
	}
	t.level(rows, now, left)
	return true
}

// ChargeRows takes amount from the rows of a bucket, whatever they hold, and evens them out.
func (t Terms) ChargeRows(rows []State, now int64, amount float64) {
	if t.Rule != nil {
		rows[0] = t.keepingLeases(t.Rule.Charge(t, t.FixClock(rows[0], now), now, amount), rows[0])
		return
	}
	t.level(rows, now, t.TokensOf(rows, now)-amount)
}

// FillRows sets the rows of a bucket to its capacity.
func (t Terms) FillRows(rows []State, now int64) {
	if t.Rule != nil {
		s := t.FixClock(rows[0], now)
		rows[0] = t.keepingLeases(t.Rule.Fill(t, s, now), s)
		return
	}
	t.level(rows, now, t.Capacity)
}

// CreditRows gives amount back to the rows of a bucket, and fills them to the capacity, or to most together where
// that is more. TS stays as it is: at each later instant Value + amount is worth what it would be if the tokens that have arrived
// were added first, because both are bounded by the capacity then. Of several rows it prefers those that are not full now: one that is
// full would gain nothing from it.
func (t Terms) CreditRows(rows []State, now int64, amount, most float64) {
	shard, n := t.OfShard(), float64(len(rows))
	most = max(shard.Capacity, most/n)
	for i := range rows {
		rows[i] = shard.FixClock(rows[i], now)
	}
	if len(rows) == 1 {
		rows[0].Value = min(max(most, rows[0].Value), rows[0].Value+amount)
		return
	}
	for _, capacity := range []float64{shard.Capacity, most} {
		shard.Capacity = capacity
		for _, share := range []float64{amount / n, amount} { // evenly, and then what the full ones left
			for i, s := range rows {
				given := min(share, amount, max(0, capacity-shard.Tokens(s, now)))
				rows[i].Value = min(max(capacity, s.Value), s.Value+given)
				amount -= given
			}
		}
	}
}

// level sets the rows of a bucket so that together they hold tokens at now, each the same.
func (t Terms) level(rows []State, now int64, tokens float64) {
	shard, each := t.OfShard(), tokens/float64(len(rows))
	for i, s := range rows {
		rows[i] = shard.keepingLeases(State{Value: each, TS: max(shard.FixClock(s, now).TS, shard.Begin(now))}, s)
	}
}

// FixClocks is FixClock for the rows of a bucket. The rows passed in stay as they are.
func (t Terms) FixClocks(rows []State, now int64) []State {
	shard, fixed := t.OfShard(), slices.Clone(rows)
	for i, s := range rows {
		fixed[i] = shard.FixClock(s, now)
	}
	return fixed
}

// TokensOf is Tokens for the rows of a bucket: what they hold together, those of a wrong clock from now on.
func (t Terms) TokensOf(rows []State, now int64) float64 {
	shard := t.OfShard()
	return sum(rows, func(s State) float64 { return shard.Tokens(shard.FixClock(s, now), now) })
}

// sum adds up what tokens returns for each row, pair by pair, so that rows which are even, as those of a full
// bucket, add up to the whole without a rounding.
func sum(rows []State, tokens func(State) float64) float64 {
	if len(rows) == 1 {
		return tokens(rows[0])
	}
	half := len(rows) / 2
	return sum(rows[:half], tokens) + sum(rows[half:], tokens)
}

// WaitOf is Wait for the rows of a bucket: they fill at their own pace, so one that is full adds nothing to
// the sum any more.
func (t Terms) WaitOf(rows []State, now int64, cost, lowest float64) time.Duration {
	rows = t.FixClocks(rows, now)
	begin := t.step(now)
	enough := func(n int64) bool { return t.TokensOf(rows, begin+n*t.Step)-cost >= lowest }
	if enough(0) {
		return 0
	}
	limit := Horizon/t.Step + 2
	n := first(t.stepsUntil(rows, begin, cost+lowest, limit), limit, enough)
	return time.Duration(min(begin+n*t.Step-now, Horizon)) * time.Microsecond
}

// stepsUntil returns about how many steps after begin the rows hold tokens together, at most limit: what is
// missing comes at the pace of the rows that are not full, until one more of them is.
func (t Terms) stepsUntil(rows []State, begin int64, tokens float64, limit int64) (n int64) {
	shard := t.OfShard()
	for range rows {
		at, filling := begin+n*t.Step, 0.0
		for _, s := range rows {
			if shard.Tokens(s, at) < shard.Capacity {
				filling++
			}
		}
		missing := tokens - t.TokensOf(rows, at)
		if missing <= 0 || filling == 0 {
			break
		}
		n = int64(min(float64(n)+math.Ceil(missing*t.Steps/(shard.Rate*filling)), float64(limit)))
	}
	return n
}
