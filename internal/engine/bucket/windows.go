package bucket

import (
	"fmt"
	"time"
)

// Windows are numbered windows whose lengths differ, such as months. Equal windows are equal values.
type Windows interface {
	// Begin returns the instant at which a window begins. A window that is left out begins with the next one.
	Begin(i int64) int64
	// Index returns the number of the window that holds an instant.
	Index(at int64) int64
	// String returns the stored form.
	fmt.Stringer
}

const (
	// lookBack is the most windows that Step and Phase cover. Rows of earlier ones are decided under their lock.
	lookBack = 4
	// longer is more than one of the Windows is longer than another, in microseconds.
	longer = 4 * 24 * 3600 * 1e6
)

// On returns the terms with the Step and the Phase of an instant, and the span in which these are as exact as the
// Windows. Another revision may be in effect at the instant: see At.
//
// Three begins are enough: of the window before, of this one and of the next. In steps of the length of the one before,
// the span begins with that, and ends with this one. Only if this one is longer, its rest has a span of its own.
func (t Terms) On(at int64) Terms {
	if t.covers(at) {
		return t
	}
	i := t.Windows.Index(at)
	before, begin, end := t.Windows.Begin(i-1), t.Windows.Begin(i), t.Windows.Begin(i+1)
	if t.Step = begin - before; at >= begin+t.Step {
		t.since, t.until, t.Step = begin, end, end-begin
	} else {
		t.since, t.until = before, min(begin+t.Step, end)
		for n := int64(2); n < lookBack && t.Windows.Begin(i-n) == t.since-t.Step; n++ {
			t.since -= t.Step
		}
	}
	t.Phase = PhaseOf(t.since, t.Step)
	return t
}

// StepsWithin returns how far after an instant a server that knows only Step and Phase counts the steps that begin up
// to a wait after it. Of windows whose lengths differ these are as many at all instants from first to last.
func (t *Terms) StepsWithin(wait time.Duration, now int64) (us, first, last int64) {
	if us = wait.Microseconds(); t.Windows == nil {
		return us, 0, 0
	}
	i, end := t.Windows.Index(now), t.Windows.Index(now+us)
	first, last = max(t.Windows.Begin(i), t.Windows.Begin(end)-us), min(t.Windows.Begin(i+1), t.Windows.Begin(end+1)-us)-1
	return (end - i) * t.Step, first, last
}

// covers reports whether Step and Phase hold at an instant.
func (t *Terms) covers(at int64) bool { return t.Windows == nil || at >= t.since && at < t.until }

// NextWindows returns when the windows begin that may follow an instant of the span of Step and Phase, in order.
func (t *Terms) NextWindows() (begins []int64) {
	since, until := t.Span()
	i := t.Windows.Index(since)
	for len(begins) < 2 || begins[len(begins)-2] < until {
		i++
		begins = append(begins, t.Windows.Begin(i))
	}
	return begins
}

// step returns the begin of the n-th step after the step of an instant. For instants before the first step it counts
// from that.
func (t *Terms) step(at, n int64) int64 {
	if t.covers(at) {
		if begin := t.Phase + (at-t.Phase)/t.Step*t.Step + n*t.Step; t.covers(begin) {
			return begin
		}
	}
	return t.Windows.Begin(t.Windows.Index(at) + n)
}

// between returns how many steps begin after one instant and up to another. An instant inside a step counts as its
// begin, and a step that a revision cut begins with the revision.
func (t *Terms) between(from, until int64) int64 {
	if t.covers(from) && t.covers(until) {
		return (max(t.Begin(until)-from, 0) + t.Step - 1) / t.Step
	}
	return max(t.Windows.Index(until)-t.Windows.Index(from), 0)
}
