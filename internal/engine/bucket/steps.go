package bucket

import (
	"math"
	"time"
)

// Steps is the Kind of token buckets and fixed windows: Rate tokens arrive each period, in Steps equal parts. A fixed
// window's step is its period, a token bucket's is a microsecond, and that is all the difference between the two.
//
//	tokens(now) = min(Capacity, Value + n * Rate / Steps)
//	n           = steps begun after TS and up to now
type Steps struct{}

// PhaseOf returns the first instant from MinInstant on that lies a whole number of steps from start. What comes
// before it has a TS that no row can hold: Begin, which divides towards zero as Postgres does, counts it to the
// step of the phase itself.
func PhaseOf(start, step int64) int64 {
	return MinInstant + (start%step-MinInstant%step+2*step)%step
}

// Begin returns the instant at which the step that holds now began, and for instants before the first step when
// that will. A step that had begun before the terms did begins with them.
func (t *Terms) Begin(now int64) int64 {
	begin := t.step(now, 0)
	if t.Revisions == nil {
		return begin
	}
	return max(begin, t.Revisions.since(t.Revision))
}

// Tokens implements Kind. Nothing arrives before TS, so a clock that steps back takes nothing away.
func (k Steps) Tokens(t Terms, s State, now int64) float64 {
	return k.after(&t, s, t.between(s.TS, now))
}

// after returns the tokens s has grown to when n more steps have begun. The conversions keep the compiler
// from fusing operations, so that the result is the same to the last bit on every machine and in Postgres.
func (Steps) after(t *Terms, s State, n int64) float64 {
	arrived := float64(float64(n)*t.Rate) / t.Steps
	return min(t.Capacity, float64(s.Value+arrived))
}

// Take implements Kind. It mirrors take_1.
func (Steps) Take(t Terms, s State, now int64, cost, lowest float64) (State, bool) {
	next := t.Kind.Charge(t, t.FixClock(s, now), now, cost)
	if !(next.Value >= lowest) {
		return s, false
	}
	return next, true
}

// written returns the row after s with another value and capacity at now.
func (Steps) written(t *Terms, s State, now int64, value, capacity float64) State {
	return State{Value: value, TS: max(t.FixClock(s, now).TS, t.Begin(now)), Capacity: capacity, Parts: s.parts(nil)}
}

// Wait implements Kind.
func (k Steps) Wait(t Terms, s State, now int64, cost, lowest float64) time.Duration {
	elapsed := t.between(s.TS, now)
	enough := func(n int64) bool { return k.after(&t, s, n)-cost >= lowest }
	if enough(elapsed) {
		return 0
	}
	estimate := math.Ceil((cost + lowest - s.Value) * t.Steps / t.Rate)
	limit := elapsed + Horizon/t.Step + 2 // counted from s.TS, and past the horizon of now
	n := first(int64(min(max(estimate, 1), float64(limit))), limit, enough)
	if n == limit {
		return time.Duration(Horizon) * time.Microsecond
	}
	return time.Duration(min(t.step(s.TS, n)-now, Horizon)) * time.Microsecond
}

// FixClock implements Kind. It keeps the value, and credits no time.
func (Steps) FixClock(t Terms, s State, now int64) State {
	s.TS = t.Begin(now)
	return s
}

// Charge implements Kind.
func (k Steps) Charge(t Terms, s State, now int64, amount float64) State {
	tokens := t.Kind.Tokens(t, s, now)
	return k.written(&t, s, now, tokens-amount, t.capacity(s, now, tokens))
}

// Credit implements Kind. TS does not change. At each later instant Value + amount gives the same tokens as if the
// arrived tokens were added first, because both are bounded by the capacity then.
func (Steps) Credit(t Terms, s State, now int64, amount, most float64, until int64) (State, bool) {
	if t.Begin(now) > until {
		return s, false
	}
	s = t.FixClock(s, now)
	s.Value = min(t.most(s, most), s.Value+amount)
	return t.Carry(s), true
}

// Fill implements Kind.
func (Steps) Fill(t Terms, s State, now int64) State {
	return State{Value: t.Capacity, TS: t.Begin(now), Capacity: t.Capacity, Parts: s.parts(nil)}
}

// Enter implements Kind.
func (Steps) Enter(t, before Terms, s State, from int64, change Change) State {
	tokens := before.Kind.Tokens(before, s, from)
	entered := State{Value: tokens, TS: from, Capacity: before.capacity(s, from, tokens), Parts: s.parts(nil)}
	if change == Carry && t.IsQuota() {
		return t.Carry(entered)
	}
	entered.Value, entered.Capacity = change.tokens(tokens, before.Capacity, t.Capacity), t.Capacity
	return entered
}

// CreditUntil implements Kind: the window of the instant, because the next window has its own tokens. A token bucket
// takes tokens back at any time.
func (Steps) CreditUntil(t Terms, taken int64) int64 {
	if t.Step <= 1 {
		return math.MaxInt64
	}
	begin, since := t.step(taken, 0), t.Revisions.since(t.Revision)
	if begin < since && t.step(taken, 1) > since { // the terms began in this window
		return since
	}
	return begin
}

// Statement implements Kind.
func (Steps) Statement() Statement { return StepStatement }

// Pruning implements Kind. Its steps are longer than any of the Windows.
func (Steps) Pruning(t Terms) Terms {
	if t.Windows != nil {
		t.Windows, t.Step = nil, t.Step+longer
	}
	return t
}

// Owes implements Kind.
func (Steps) Owes() bool { return true }

// fullAfter returns terms that fill a row exactly one step after its TS, for any number of tokens owed. The step has
// that many microseconds.
func fullAfter(idle int64, t Terms) Terms {
	t.Step, t.Steps, t.Kind = idle, 1, Steps{}
	t.Capacity, t.Rate = 1e100, 1e101
	return t
}

// first returns the smallest n in [1, limit] for which ok holds, or limit when there is none. ok must not turn false
// again as n grows. It looks around estimate first, and doubles the radius until the answer is bracketed. So an
// estimate that is off by a rounding costs only a few calls.
func first(estimate, limit int64, ok func(int64) bool) int64 {
	estimate = min(max(estimate, 1), limit)
	low, high := estimate-1, estimate
	for radius := int64(1); low > 0 && ok(low); radius *= 2 {
		high, low = low, max(low-radius, 0)
	}
	for radius := int64(1); high < limit && !ok(high); radius *= 2 {
		low, high = high, min(high+radius, limit)
	}
	for low+1 < high { // ok(high), or high is limit; not ok(low), or low is 0
		if middle := low + (high-low)/2; ok(middle) {
			high = middle
		} else {
			low = middle
		}
	}
	return high
}
