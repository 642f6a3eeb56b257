package ratelimit

import (
	"context"
	"time"
)

// The time for a call is over up to a sixteenth of it late, because one timer ends all calls of a batcher: a timer for
// each took 3 % of the calls a second that 64 callers make.
const sweepsPerTimeout = 16

// deadline returns when a call that is made now ends; the zero time when its context ends it sooner, or never.
func (b *batcher) deadline(ctx context.Context) time.Time {
	if !bounds(ctx, b.timeout) {
		return time.Time{}
	}
	return time.Now().Add(b.timeout)
}

// sweep ends the calls whose time is over, as long as there are calls.
func (b *batcher) sweep() {
	if b.sweeping || b.timeout <= 0 {
		return
	}
	b.sweeping = true
	time.AfterFunc(max(b.timeout/sweepsPerTimeout, time.Millisecond), func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.sweeping = false
		for _, c := range b.overdue(time.Now()) {
			if b.giveUp(c) {
				c.err = context.DeadlineExceeded
				c.done <- struct{}{}
			}
		}
		if b.queued > 0 || len(b.out) > 0 {
			b.sweep()
		}
	})
}

// overdue returns the calls whose time is over.
func (b *batcher) overdue(now time.Time) (over []*call) {
	add := func(calls []*call) {
		for _, c := range calls {
			if !c.deadline.IsZero() && now.After(c.deadline) {
				over = append(over, c)
			}
		}
	}
	add(b.queue)
	for _, f := range b.out {
		add(f.calls)
		add(f.behind)
	}
	return over
}
