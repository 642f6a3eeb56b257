package bucket

import "time"

// Content is what a bucket holds, and under which terms. Many may share one: it does not change.
type Content struct {
	Terms Terms
	State State
	Rows  []State // of each row, when the bucket is spread over several
}

// Told is what a decision says of one bucket.
type Told struct {
	*Content
	Now        int64
	Allowed    bool
	Tokens     float64       // that are left
	RetryAfter time.Duration // 0 when allowed
	FullAfter  time.Duration
}

// Tokens returns what the bucket holds at an instant, as Terms.Tokens.
func (h *Content) Tokens(now int64) float64 {
	if h.Rows != nil {
		return h.Terms.TokensOf(h.Rows, now)
	}
	return h.Terms.Tokens(h.State, now)
}

// Wait returns how long it takes from an instant until cost tokens can be taken, as Terms.Wait.
func (h *Content) Wait(now int64, cost float64) time.Duration {
	if h.Rows != nil {
		return h.Terms.WaitOf(h.Rows, now, cost, 0)
	}
	return h.Terms.Wait(h.State, now, cost, 0)
}

// Answer returns what a call at an instant would find in the bucket of the ask. A wrong clock in it is put right.
func (h *Content) Answer(a *Ask, now int64) Answer {
	r := Answer{Now: now, State: h.Terms.FixClock(h.State, now)}
	if h.Rows != nil {
		r.SetRows(a, h.Terms.FixClocks(h.Rows, now))
	}
	return r
}
