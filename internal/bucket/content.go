package bucket

import (
	"slices"
	"time"
)

// Content is what a bucket holds, and under which terms. Many may share one: it does not change.
type Content struct {
	Terms Terms
	State State
	Rows  Rows // of each row, when the bucket is spread over several
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

// Tokens returns what the bucket holds at an instant.
func (h *Content) Tokens(now int64) float64 { return rowsOf(h.State, h.Rows).Tokens(&h.Terms, now) }

// Wait returns how long it takes from an instant until cost tokens can be taken.
func (h *Content) Wait(now int64, cost float64) time.Duration {
	return rowsOf(h.State, h.Rows).Wait(&h.Terms, now, cost, 0)
}

// Answer returns the content of the bucket of the ask at an instant. It corrects a wrong clock in the row.
func (h *Content) Answer(a *Ask, now int64) Answer {
	r := Answer{Now: now}
	rows := slices.Clone(rowsOf(h.State, h.Rows))
	rows.FixClocks(&h.Terms, now)
	r.SetRows(a, rows)
	return r
}
