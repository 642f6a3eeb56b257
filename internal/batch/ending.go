package batch

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// maxEndings is how many calls an ending is for, one after the other. What somebody has derived from the context of one
	// of them, as a hook of the pool may, and has not ended, ends after so many calls.
	maxEndings = 64
	// maxSpare bounds the endings that are kept for other calls.
	maxSpare = 64
)

// ending is what ends calls that run on the goroutines of their callers, one call at a time: with the context of the caller,
// or when its time is over. Most calls end before that, and leave it as it was for the next. A context and a timer of its
// own for each call would be seven allocations.
type ending struct {
	ctx     context.Context //nolint:containedctx // it is what ends the calls' contexts
	cancel  context.CancelCauseFunc
	timer   *time.Timer
	overdue atomic.Bool // whether it ended a call because its time was over
	left    int         // calls that it may be for

	caller context.Context //nolint:containedctx // of the call that it is for
	follow func()          // ends it with the caller's
	stop   func() bool     // stops it from following; nil: the caller's never ends
}

// endings are those that are of no call now, the one that has waited longest first: each gets its turn.
type endings struct {
	mu    sync.Mutex
	spare []*ending
}

// get returns one of them, or a new one.
func (s *endings) get() *ending {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.spare) == 0 {
		return newEnding()
	}
	e := s.spare[0]
	s.spare = s.spare[:copy(s.spare, s.spare[1:])]
	return e
}

// put keeps an ending, and reports whether there was room for it.
func (s *endings) put(e *ending) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.spare) == maxSpare {
		return false
	}
	s.spare = append(s.spare, e)
	return true
}

func newEnding() *ending {
	e := &ending{left: maxEndings}
	e.ctx, e.cancel = context.WithCancelCause(context.Background())
	e.follow = func() { e.cancel(context.Cause(e.caller)) }
	return e
}

// expire ends the call because its time is over.
func (e *ending) expire() {
	e.overdue.Store(true)
	e.cancel(context.DeadlineExceeded)
}

// callContext is the context of a call that runs on the goroutine of its caller: the caller's, with an earlier deadline.
type callContext struct {
	context.Context //nolint:containedctx // it is one: the caller's

	ending   *ending
	deadline time.Time
}

func (c *callContext) Deadline() (time.Time, bool) { return c.deadline, true }

func (c *callContext) Done() <-chan struct{} { return c.ending.ctx.Done() }

func (c *callContext) Err() error {
	err := c.ending.ctx.Err()
	switch {
	case err == nil:
		return nil
	case c.ending.overdue.Load():
		return context.DeadlineExceeded
	}
	if of := c.Context.Err(); of != nil {
		return of
	}
	return err // the call has ended
}

// Value returns the caller's, but for what tells package context by what it ends.
func (c *callContext) Value(key any) any {
	if v := c.ending.ctx.Value(key); v != nil {
		return v
	}
	return c.Context.Value(key)
}

// bound sets c to the context of a call that ends with ctx, or at the deadline.
func (b *Batcher[T]) bound(c *callContext, ctx context.Context, deadline time.Time) {
	e := b.endings.get()
	e.left--
	e.caller, e.stop = ctx, nil
	*c = callContext{Context: ctx, ending: e, deadline: deadline}
	if e.timer == nil {
		e.timer = time.AfterFunc(time.Until(deadline), e.expire)
	} else {
		e.timer.Reset(time.Until(deadline))
	}
	if ctx.Done() != nil {
		e.stop = context.AfterFunc(ctx, e.follow)
	}
}

// unbound ends what bound began, once the call has. Where nothing has ended it sooner, what ends it is kept for another call.
func (b *Batcher[T]) unbound(c *callContext) {
	e := c.ending
	runs := e.timer.Stop()
	if e.stop != nil {
		runs = e.stop() && runs
	}
	if runs && e.left > 0 {
		e.caller, e.stop = nil, nil
		if b.endings.put(e) {
			return
		}
	}
	e.cancel(context.Canceled)
}
