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
	t.Capacity, t.Rate, t.MaxOwed, t.Shards = t.Capacity/n, t.Rate/n, t.MaxOwed/n, 1
	t.OfRow = true
	return t
}

// FromFuture reports whether s was written by a clock that was wrong. So a window that was used too early delays the
// next tokens by at most its period and the tolerance.
func (*Terms) FromFuture(s State, now int64) bool { return s.TS > now+ClockTolerance.Microseconds() }

// FixClock returns s with TS set to now, if a wrong clock left it in the future.
func (t *Terms) FixClock(s State, now int64) State {
	if !t.FromFuture(s, now) {
		return s
	}
	return t.Kind.FixClock(*t, s, now)
}

// Sharded reports whether the bucket is spread over several rows.
func (a *Ask) Sharded() bool { return a.Terms.Shards > 1 }

// OfShard returns the ask for one row of the bucket. The caller sets its cost.
func (a *Ask) OfShard(shard int32) Ask {
	row := *a
	row.Key.Shard, row.Terms, row.Cost, row.Lowest = shard, a.Terms.OfShard(), 0, 0
	return row
}

// Estimate extends the answer for one row to a bucket of n rows, as if the other rows held as much as this row did before.
func (a *Ask) Estimate(r Answer, n int32, taken bool) Answer {
	if !taken {
		r.State.Value, r.State.Capacity = r.State.Value*float64(n), r.State.Capacity*float64(n)
		return r
	}
	before := min(r.State.Value+a.Cost, a.Terms.Capacity)
	r.State.Value, r.State.Capacity = before*float64(n)-a.Cost, r.State.Capacity*float64(n)
	return r
}

// SetRows sets the state of the bucket of the ask after the decision: of its row, or of all its rows.
func (r *Answer) SetRows(a *Ask, rows []State) {
	if !a.Sharded() {
		r.State = rows[0]
		return
	}
	r.Rows = slices.Clone(rows) // later calls may change those
	r.State = State{Value: r.Rows.Tokens(&a.Terms, r.Now), TS: a.Terms.Begin(r.Now), Capacity: a.Terms.Capacity}
}

// rows returns the rows of the bucket, which are even in an estimate.
func (r *Answer) rows(a *Ask) Rows {
	if r.Rows != nil {
		return r.Rows
	}
	row, n := r.State, max(a.Terms.Shards, 1)
	row.Value, row.Capacity = row.Value/float64(n), row.Capacity/float64(n)
	return slices.Repeat(Rows{row}, int(n))
}

// wait returns how long it takes from the answer until cost tokens can be taken and lowest remain.
func (r *Answer) wait(t *Terms, cost, lowest float64) time.Duration {
	return rowsOf(r.State, r.Rows).Wait(t, r.Now, cost, lowest)
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
func (c Change) IsByRow(before, t *Terms) bool {
	raised := t.Shards > 1 && t.Capacity > before.Capacity
	return c == Reset || t.Shards == before.Shards && !(c == Keep && raised)
}

// Rows are the rows of one bucket. Its methods treat them as one row with the terms of the bucket. Only buckets of Steps have several rows.
type Rows []State

// rowsOf returns the rows of a bucket, or its one row if there are no several.
func rowsOf(one State, several Rows) Rows {
	if several != nil {
		return several
	}
	return Rows{one}
}

// Take takes cost from all rows together and makes them even, if at least lowest remain. Otherwise it leaves them as they are.
func (r Rows) Take(t *Terms, now int64, cost, lowest float64) (allowed bool) {
	if len(r) == 1 {
		r[0], allowed = t.Kind.Take(*t, r[0], now, cost, lowest)
		return allowed
	}
	left := r.Tokens(t, now) - cost
	if !(left >= lowest) {
		return false
	}
	r.level(t, now, left)
	return true
}

// Charge takes amount from the rows, even below zero, and makes them even.
func (r Rows) Charge(t *Terms, now int64, amount float64) {
	if len(r) == 1 {
		r[0] = t.Kind.Charge(*t, t.FixClock(r[0], now), now, amount)
		return
	}
	r.level(t, now, r.Tokens(t, now)-amount)
}

// Fill fills each row.
func (r Rows) Fill(t *Terms, now int64) {
	row := t.OfShard()
	for i, s := range r {
		r[i] = row.Kind.Fill(row, s, now)
	}
}

// Credit gives amount back to the rows, up to their capacity, or up to most in total if that is higher. It prefers rows that are not
// full, because a full row would gain nothing. If the step of until is over, it gives nothing and returns false.
func (r Rows) Credit(t *Terms, now int64, amount, most float64, until int64) (given bool) {
	if len(r) == 1 {
		r[0], given = t.Kind.Credit(*t, r[0], now, amount, most, until)
		return given
	}
	if t.Begin(now) > until {
		return false
	}
	r.FixClocks(t, now)
	row, n := t.OfShard(), float64(len(r))
	full := row
	for _, full.Capacity = range []float64{row.Capacity, max(row.Capacity, most/n)} {
		for _, share := range []float64{amount / n, amount} { // evenly, and then what the full ones left
			for i, s := range r {
				given := min(share, amount, max(0, full.room(s, now)))
				s.Value = min(full.most(s, 0), s.Value+given)
				r[i] = row.Carry(s)
				amount -= given
			}
		}
	}
	return true
}

// room returns how many tokens a row takes back at now.
func (t *Terms) room(s State, now int64) float64 {
	most := t.Capacity
	if t.IsQuota() {
		most = max(most, s.Capacity)
	}
	return most - t.Kind.Tokens(*t, s, now)
}

// level sets the rows so that together they hold tokens at now, each the same. A row of a window that has used more
// than its share of the quota stays without tokens.
func (r Rows) level(t *Terms, now int64, tokens float64) {
	row, n := t.OfShard(), 0
	of := make([]float64, len(r))
	for i, s := range r {
		if of[i] = row.capacity(s, now, row.Kind.Tokens(row, s, now)); !row.IsQuota() || of[i] == row.Capacity {
			n++
		}
	}
	if tokens < 0 {
		n = len(r)
	}
	for i, s := range r {
		each := tokens / float64(max(n, 1))
		if tokens >= 0 && row.IsQuota() && of[i] != row.Capacity {
			each = 0
		}
		r[i] = Steps{}.written(&row, s, now, each, of[i])
	}
}

// FixClocks fixes the clock of each row.
func (r Rows) FixClocks(t *Terms, now int64) {
	for i, s := range r {
		r[i] = t.FixClock(s, now)
	}
}

// Tokens returns the tokens that the rows hold together.
func (r Rows) Tokens(t *Terms, now int64) float64 {
	if len(r) == 1 {
		return t.Kind.Tokens(*t, r[0], now)
	}
	row := t.OfShard()
	return r.sum(func(s State) float64 { return row.Kind.Tokens(row, s, now) })
}

// sum adds up tokens of each row, pair by pair. So equal rows, such as the rows of a full bucket, add up to the whole without
// rounding.
func (r Rows) sum(tokens func(State) float64) float64 {
	if len(r) == 1 {
		return tokens(r[0])
	}
	half := len(r) / 2
	return r[:half].sum(tokens) + r[half:].sum(tokens)
}

// Wait returns how long it takes from now until Take succeeds. Rows fill at their own pace, and a full row adds nothing more to the sum.
func (r Rows) Wait(t *Terms, now int64, cost, lowest float64) time.Duration {
	if len(r) == 1 {
		return t.Kind.Wait(*t, t.FixClock(r[0], now), now, cost, lowest)
	}
	r = slices.Clone(r)
	r.FixClocks(t, now)
	enough := func(n int64) bool { return r.Tokens(t, t.step(now, n))-cost >= lowest }
	if enough(0) {
		return 0
	}
	limit := Horizon/t.Step + 2
	n := first(r.stepsUntil(t, now, cost+lowest, limit), limit, enough)
	return time.Duration(min(t.step(now, n)-now, Horizon)) * time.Microsecond
}

// stepsUntil returns the approximate number of steps after which the rows hold tokens in total, at most limit. Missing tokens
// arrive at the pace of the rows that are not full, until one more row is full.
func (r Rows) stepsUntil(t *Terms, now int64, tokens float64, limit int64) (n int64) {
	row := t.OfShard()
	for range r {
		at, filling := t.step(now, n), 0.0
		for _, s := range r {
			if row.Kind.Tokens(row, s, at) < row.Capacity {
				filling++
			}
		}
		missing := tokens - r.Tokens(t, at)
		if missing <= 0 || filling == 0 {
			break
		}
		n = int64(min(float64(n)+math.Ceil(missing*t.Steps/(row.Rate*filling)), float64(limit)))
	}
	return n
}
