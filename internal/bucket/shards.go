package bucket

import (
	"math"
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
	row := t.OfShard()
	for i := range rows {
		s := row.FixClock(rows[i], now)
		full := State{Value: row.Capacity, TS: max(s.TS, row.Begin(now))}
		if row.Rule != nil {
			full = row.Rule.Fill(row, s, now)
		}
		rows[i] = row.keepingLeases(full, s)
	}
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
	shard, fixed := t.OfShard(), make([]State, len(rows))
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
