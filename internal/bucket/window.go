package bucket

import "math"

// PhaseOf returns the first instant from MinInstant on that lies a whole number of steps from start. What comes
// before it has a TS that no row can hold: Begin, which divides towards zero as Postgres does, counts it to the
// step of the phase itself.
func PhaseOf(start, step int64) int64 {
	return MinInstant + (start%step-MinInstant%step+2*step)%step
}

// RefundUntil returns the begin of the last step that may be given back what was taken at an instant: the window of
// that instant, as the next one has its own tokens. A token bucket may be given it back at any time.
func (t Terms) RefundUntil(taken int64) int64 {
	if t.Rule != nil {
		return t.Rule.RefundUntil(t, taken)
	}
	if t.Step <= 1 {
		return math.MaxInt64
	}
	t = t.OnWindows(taken)
	begin := t.step(taken)
	if since := t.since(); begin < since && begin+t.Step > since { // the terms began in this window
		return since
	}
	return begin
}
