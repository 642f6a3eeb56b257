package bucket

import (
	"slices"
	"time"
)

// MaxSlices bounds the slices of a sliding window: each is a number in every row. With so many slices and spareTotals,
// a row is still shorter than the 2 kB from which on Postgres would compress it.
const MaxSlices = 128

// Sliding is the Kind of a sliding window. Its Period is counted in slices, each a Step long:
//
//	tokens(now) = Capacity - tokens taken in the slice of now and in the Slices before it
//
// So a slice counts until all of it is more than a Period ago. Parts.Taken has the length of a slice in microseconds,
// the Value of the row, and running totals of the tokens taken. The first total is up to now, the second up to the end
// of the slice before the slice of TS, and so on backwards. The difference of two totals is the number of tokens that
// count, for any number of slices. A decision inserts a total for each slice that has begun since, and changes only the
// first total. So Postgres logs only the front of the row. So old totals stay for a while: a decision that finds more
// than spareTotals of them drops them. If totals have grown to more than mostTotals times the Capacity, Go reduces
// them, so that they keep their precision.
//
// The first two numbers identify rows that other terms have written. If the slices have another length, each old slice
// goes to the new slice that holds its end, so that it counts no shorter. A slice that has not ended goes to the slice
// of now. If the Value differs, another kind of limit or an older program has written the row. Then the tokens missing
// to the Capacity of the row were taken in the slice of TS.
type Sliding struct {
	Steps
	Slices int32
}

// The numbers that Parts.Taken begins with.
const (
	takenLength = iota
	takenValue
	takenTotals // from here on, two or more
)

// Both stand in slide_1, too.
const (
	spareTotals = 44
	mostTotals  = 64
)

// Tokens implements Kind.
func (r Sliding) Tokens(t Terms, s State, now int64) float64 {
	totals, _ := r.at(t, s, now)
	return r.left(t, totals)
}

// Wait implements Kind: until enough of the oldest slices have fallen out. It subtracts the same numbers as Take does
// then.
func (r Sliding) Wait(t Terms, s State, now int64, cost, lowest float64) time.Duration {
	totals, ts := r.at(t, s, now)
	switch {
	case !(t.Capacity-cost >= lowest):
		return time.Duration(Horizon) * time.Microsecond
	case r.length(t, s) != t.Step:
		return r.waitForEnds(t, s, now, cost, lowest)
	}
	with := totals[0] + cost
	passed := int64(0)
	for passed <= int64(r.Slices) && !(t.Capacity-(with-r.base(totals, passed)) >= lowest) {
		passed++
	}
	if passed == 0 {
		return 0
	}
	forgotten := t.step(s.TS, 0) + (int64(r.Slices)+1)*t.Step // the row, also if the sum is rounded up
	return time.Duration(min(t.step(ts, 0)+passed*t.Step, forgotten)-now) * time.Microsecond
}

// waitForEnds is Wait for a row whose slices have another length: until enough of them have expired.
func (r Sliding) waitForEnds(t Terms, s State, now int64, cost, lowest float64) time.Duration {
	at := now
	for i := len(s.Parts.Taken) - takenTotals - 2; i >= 0; i-- {
		if _, enough := r.Take(t, s, at, cost, lowest); enough {
			break
		}
		at = max(at, t.step(endOf(t, s.TS, r.length(t, s), i), 0)+(int64(r.Slices)+1)*t.Step)
	}
	return time.Duration(min(at-now, Horizon)) * time.Microsecond
}

// Charge implements Kind. Take, which charges what remains, mirrors slide_1.
func (r Sliding) Charge(t Terms, s State, now int64, amount float64) State {
	totals, ts := r.at(t, s, now)
	totals[0] += amount
	return r.state(t, s, totals, ts)
}

// Credit implements Kind. With an until it gives back to the slice that began then; without, to the newest slices. A
// sliding window has no reservations, so tokens that are ready later were taken under another kind. They count in the
// slice of TS until a sliding window has written the row.
func (r Sliding) Credit(t Terms, s State, now int64, amount, _ float64, until int64) (State, bool) {
	s = t.FixClock(s, now)
	totals, ts := r.at(t, s, now)
	totals = totals[:r.needed(totals)]
	first, end := int64(0), int64(len(totals)-1)
	if until < MaxInstant {
		if until > t.step(s.TS, 0) {
			if isSlid(s) {
				return s, false
			}
			until = t.step(s.TS, 0)
		}
		first = (t.step(ts, 0) - until) / t.Step
		end = min(end, first+1)
	}
	rest := amount
	for i := first; i < end && rest > 0; i++ {
		given := min(rest, totals[i]-totals[i+1])
		for j := range totals[:i+1] {
			totals[j] = max(totals[j]-given, totals[i+1])
		}
		rest -= given
	}
	if rest == amount {
		return s, false
	}
	return r.state(t, s, totals, ts), true
}

// Fill implements Kind.
func (r Sliding) Fill(t Terms, s State, now int64) State {
	return r.state(t, s, totalsOf(0), t.Begin(now))
}

// Enter implements Kind. It keeps the tokens taken that still count, or with Scale their share of the capacity.
func (r Sliding) Enter(t, before Terms, s State, from int64, change Change) State {
	slid, _ := before.Kind.(Sliding)
	totals, ts := slid.at(before, s, from)
	totals, ts = r.rebinned(t, totals[:slid.needed(totals)], before.Step, ts, from)
	if change == Scale && before.Capacity > 0 {
		for i := range totals {
			totals[i] *= t.Capacity / before.Capacity
		}
	}
	return r.state(t, s, r.shifted(t, totals, ts, from), from)
}

// CreditUntil implements Kind: the slice in which tokens taken then are counted.
func (r Sliding) CreditUntil(t Terms, taken int64) int64 {
	since := t.Revisions.since(t.Revision)
	if taken >= since {
		return t.step(taken, 0)
	}
	before := t.Revisions.Holding(taken)
	return t.step(min(before.step(taken, 0)+before.Step-1, since), 0)
}

// Owes implements Kind.
func (Sliding) Owes() bool { return false }

// Pruning implements Kind.
func (r Sliding) Pruning(t Terms) Terms { return fullAfter((int64(r.Slices)+1)*t.Step, t) }

// Statement implements Kind.
func (Sliding) Statement() Statement { return WindowStatement }

// at returns the totals at now, the newest first, and the TS of a row that says so.
func (r Sliding) at(t Terms, s State, now int64) (totals []float64, ts int64) {
	totals, ts = r.read(t, s, now)
	if totals[0] > mostTotals*t.Capacity {
		totals = r.lowered(totals)
	}
	return r.shifted(t, totals, ts, now), max(ts, t.Begin(now))
}

// Counted returns the totals of the row that count at now, and the instant in whose slice the first of them is.
func (r Sliding) Counted(t Terms, s State, now int64) (totals []float64, ts int64) {
	totals, ts = r.read(t, s, now)
	return totals[:r.needed(totals)], ts
}

// read returns the totals of the row at now, and the instant in whose slice the first of them is.
func (r Sliding) read(t Terms, s State, now int64) ([]float64, int64) {
	if !isSlid(s) {
		return totalsOf(min(max(0, s.Capacity-s.Value), 1e300)), s.TS // so that sums of them stay finite
	}
	return r.rebinned(t, slices.Clone(s.Parts.Taken[takenTotals:]), r.length(t, s), s.TS, max(s.TS, now))
}

// lowered returns smaller totals for totals that have grown large. Their differences stay the same to the last bit: it
// subtracts a multiple of the precision of the largest total.
func (r Sliding) lowered(totals []float64) []float64 {
	by := r.base(totals, 0) + totals[0] - totals[0]
	lowered := slices.Clone(totals[:r.needed(totals)])
	for i := range lowered {
		lowered[i] -= by
	}
	return lowered
}

// shifted returns the totals at now, for totals up to the slice of ts. It has room for the total that a caller adds. It
// drops old totals if there are too many.
func (r Sliding) shifted(t Terms, totals []float64, ts, now int64) []float64 {
	passed := max((t.step(now, 0)-t.step(ts, 0))/t.Step, 0)
	if passed > int64(r.Slices) {
		return totalsOf(0)
	}
	needed := int64(r.Slices) + 2 - passed
	if int64(len(totals)) > needed+spareTotals {
		totals = totals[:needed]
	}
	return append(slices.Repeat(totals[:1], int(passed)), totals...)
}

// base returns the total from which on tokens count after that many more slices. After more slices than there are, none
// count.
func (r Sliding) base(totals []float64, passed int64) float64 {
	return totals[min(int64(r.Slices)+1-passed, int64(len(totals))-1)]
}

func (r Sliding) needed(totals []float64) int { return min(int(r.Slices)+2, len(totals)) }

// left returns what the totals leave of the Capacity.
func (r Sliding) left(t Terms, totals []float64) float64 {
	return t.Capacity - (totals[0] - r.base(totals, 0))
}

// totalsOf returns the totals of an amount taken in one slice.
func totalsOf(amount float64) []float64 { return []float64{amount, 0} }

// length returns how long the slices of the row are.
func (r Sliding) length(t Terms, s State) int64 {
	if isSlid(s) {
		if length := s.Parts.Taken[takenLength]; length >= 1 && length <= float64(MaxSpan.Microseconds()) {
			return int64(length)
		}
	}
	return t.Step
}

// isSlid reports whether a sliding window has written the row last.
func isSlid(s State) bool {
	return s.Parts != nil && len(s.Parts.Taken) >= takenTotals+2 && s.Parts.Taken[takenValue] == s.Value
}

// endOf returns the last instant of the i-th slice before the slice of ts, for slices of a length.
func endOf(t Terms, ts, length int64, i int) int64 {
	return t.Phase + ((ts-t.Phase)/length+1-int64(i))*length - 1
}

// rebinned converts totals of slices of another length to slices of t. Tokens taken in an old slice go to the slice
// that holds its end, and not behind the slice of latest. ts lies in the newest slice, before and after.
func (r Sliding) rebinned(t Terms, totals []float64, length, ts, latest int64) ([]float64, int64) {
	if length == t.Step {
		return totals, ts
	}
	newest, most := t.step(min(endOf(t, ts, length, 0), latest), 0), int64(r.Slices)+1
	binned := make([]float64, 2, most+1)
	for i := range totals[1:] {
		bin := (newest - t.step(min(endOf(t, ts, length, i), latest), 0)) / t.Step
		if bin >= most {
			break
		}
		for int64(len(binned)) <= bin+1 {
			binned = append(binned, 0)
		}
		binned[bin] += totals[i] - totals[i+1]
	}
	for i := len(binned) - 2; i >= 0; i-- {
		binned[i] += binned[i+1]
	}
	return binned, max(newest, ts)
}

// state returns the row after s with these totals. The first belongs to the slice of ts.
func (r Sliding) state(t Terms, s State, totals []float64, ts int64) State {
	value := r.left(t, totals)
	return State{
		Value: value, TS: ts, Capacity: t.Capacity,
		Parts: s.parts(append([]float64{float64(t.Step), value}, totals...)),
	}
}
