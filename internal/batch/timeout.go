package batch

import (
	"context"
	"time"
)

// The time for a call is over up to a sixteenth of it late, because one timer ends all calls of a Batcher. A timer for
// each call took 3 % of the calls a second that 64 callers make.
const sweepsPerTimeout = 16

// Bounds reports whether a call with ctx is to end after timeout. It is not, when timeout is not above 0, or ctx ends
// sooner.
func Bounds(ctx context.Context, timeout time.Duration) bool {
	if timeout <= 0 {
		return false
	}
	deadline, ends := ctx.Deadline()
	return !ends || time.Until(deadline) > timeout
}

// deadline returns when a call that is made now ends; the zero time when its context ends it sooner, or never.
func (b *Batcher[T]) deadline(ctx context.Context) time.Time {
	if !Bounds(ctx, b.options.Timeout) {
		return time.Time{}
	}
	return time.Now().Add(b.options.Timeout)
}

// sweep ends the calls whose time is over, as long as there are calls.
func (b *Batcher[T]) sweep() {
	if b.sweeping || b.options.Timeout <= 0 {
		return
	}
	b.sweeping = true
	time.AfterFunc(max(b.options.Timeout/sweepsPerTimeout, time.Millisecond), func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.sweeping = false
		for _, c := range b.overdue(time.Now()) {
			if b.giveUp(c) {
				c.err = context.DeadlineExceeded
				c.done <- struct{}{}
			}
		}
		if b.queued > 0 || len(b.inFlight) > 0 {
			b.sweep()
		}
	})
}

// overdue returns the calls whose time is over.
func (b *Batcher[T]) overdue(now time.Time) (over []*Call[T]) {
	add := func(calls []*Call[T]) {
		for _, c := range calls {
			if !c.deadline.IsZero() && now.After(c.deadline) {
				over = append(over, c)
			}
		}
	}
	add(b.queue)
	for _, f := range b.inFlight {
		add(f.calls)
		add(f.parked)
	}
	return over
}
