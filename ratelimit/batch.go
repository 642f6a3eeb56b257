package ratelimit

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// call is one call outside a transaction.
type call struct {
	verb    string
	plan    *plan
	reserve bool // whether a reservation is to be recorded
	look    bool // whether nothing is to be taken

	answers     []answer
	one         [1]answer // what answers is when there is one bucket
	reservation Reservation
	err         error
	panicked    any // what its flight panicked with

	ctx    context.Context //nolint:containedctx // the batch that answers the call carries on its values
	waiter *waiter
	done   chan struct{}
	stage  atomic.Int32
	flight *flight
	seat   int // its place in the flight, in the order of arrival
}

// The stages of a call that waits. The last two are final.
const (
	stageWaiting  int32 = iota
	stageAboard         // of a batch
	stageAnswered       // by it
	stageLeft           // its caller gave up
)

// decider answers calls: one by itself, or those of a batch, each with call.finish. A Limiter is one.
type decider interface {
	batches() bool
	alone(ctx context.Context, c *call) error
	fly(ctx context.Context, calls []*call)
}

// batcher folds concurrent calls into batches. A call that finds nothing in its way runs at once and by
// itself; those that come while all flights are out wait for the next one to land, and leave together.
// Nothing is held back for company. The calls for one bucket are answered in the order in which they came: a
// bucket is in one flight at a time, and a call does not overtake an earlier one for any of its buckets.
type batcher struct {
	decider decider
	limit   int           // calls that may wait
	timeout time.Duration // that a call may wait for its answer; none when it is not above 0
	spare   sync.Pool     // of waiter

	mu       sync.Mutex
	queue    []*call            // in the order they came; some have left
	queued   int                // those that have not
	users    map[which]int      // calls, in the queue or aloft, for each bucket
	aloft    map[which]struct{} // buckets of the flights
	flights  int                // out, or about to leave
	out      []*flight
	late     int         // flights that are
	watching bool        // for flights that are late
	shut     atomic.Bool // closed, for those who do not wait in the queue
	closed   bool
	landed   chan struct{} // closed when the last flight has landed after Close
}

func newBatcher(l *Limiter) *batcher {
	return &batcher{
		decider: l, limit: l.config.MaxWaiting, timeout: l.config.Timeout,
		users: make(map[which]int), aloft: make(map[which]struct{}), landed: make(chan struct{}),
	}
}

// batches reports whether calls are folded: not on a single connection, which one caller at a time can use.
func (l *Limiter) batches() bool {
	return !l.config.NoBatching && l.connection() == nil
}

// do answers c, by itself or as one of a batch.
func (b *batcher) do(ctx context.Context, c *call) error {
	if !b.decider.batches() {
		return b.single(ctx, c)
	}
	c.ctx = ctx
	c.waiter, _ = b.spare.Get().(*waiter)
	if c.waiter == nil {
		c.waiter = &waiter{done: make(chan struct{}, 1)}
	}
	c.done = c.waiter.done
	defer b.spare.Put(c.waiter) // nobody answers a call that has its answer, or was left
	departs, err := b.enqueue(c)
	if err != nil {
		return err
	}
	if departs {
		runtime.Gosched() // those who are about to call may come along; when nobody is, this takes no time
		f := b.depart(nil)
		switch {
		case f != nil && len(f.calls) == 1 && f.calls[0] == c:
			return b.solo(ctx, f)
		case f != nil:
			go b.fly(f)
		}
	}
	return b.wait(ctx, c)
}

// single answers c by itself where calls are not folded. It counts as a flight, for Close to wait for.
func (b *batcher) single(ctx context.Context, c *call) error {
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return ErrClosed
	}
	b.flights++
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.end()
	}()
	return b.decider.alone(ctx, c)
}

// enqueue adds c to the queue. departs is true when a flight is to leave for it.
func (b *batcher) enqueue(c *call) (departs bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	departs = !b.full() && !b.inUse(c)
	switch {
	case b.closed:
		return false, ErrClosed
	case !departs && b.queued >= b.limit:
		return false, fmt.Errorf("%w (%d)", ErrOverloaded, b.queued)
	}
	if c.done == nil {
		c.done = make(chan struct{}, 1)
	}
	if !c.look {
		for i := range c.plan.buckets {
			b.users[c.plan.buckets[i].whole()]++
		}
	}
	b.queue = append(b.queue, c)
	b.queued++
	if departs {
		b.flights++
	}
	b.watch()
	return departs, nil
}

// inUse reports whether an earlier call that is not answered yet asks for a bucket of c.
func (b *batcher) inUse(c *call) bool {
	if c.look {
		return false
	}
	for i := range c.plan.buckets {
		if b.users[c.plan.buckets[i].whole()] > 0 {
			return true
		}
	}
	return false
}

// wait waits until c is answered, its context ends, or the time for a call has passed.
func (b *batcher) wait(ctx context.Context, c *call) error {
	var late <-chan time.Time
	if bounds(ctx, b.timeout) {
		timer := c.waiter.start(b.timeout)
		defer timer.Stop()
		late = timer.C
	}
	ended := context.DeadlineExceeded
	select {
	case <-c.done:
		return c.result()
	case <-ctx.Done():
		ended = ctx.Err()
	case <-late:
	}
	switch {
	case c.stage.CompareAndSwap(stageWaiting, stageLeft):
		b.leave(c)
	case c.stage.CompareAndSwap(stageAboard, stageLeft):
		b.mu.Lock()
		defer b.mu.Unlock()
		if c.flight.alive.Add(-1) == 0 {
			c.flight.cancel()
		}
	default: // it was answered this moment
		<-c.done
		return c.result()
	}
	return ended
}

// waiter is what a call waits with. A call leaves it as it found it, for the next one.
type waiter struct {
	done  chan struct{}
	timer *time.Timer
}

// start starts the waiter's timer.
func (w *waiter) start(d time.Duration) *time.Timer {
	if w.timer == nil {
		w.timer = time.NewTimer(d)
	} else {
		w.timer.Reset(d)
	}
	return w.timer
}

// leave forgets a call that has left the queue.
func (b *batcher) leave(c *call) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.queued--
	b.release(c)
	if len(b.queue) > 2*b.queued+64 {
		kept := b.queue[:0]
		for _, c := range b.queue {
			if c.stage.Load() != stageLeft {
				kept = append(kept, c)
			}
		}
		clear(b.queue[len(kept):])
		b.queue = kept
	}
	if b.inUse(c) { // by calls behind it, some of which may have waited for c alone
		b.send()
	}
}

// release takes a call's buckets out of the count of those in use.
func (b *batcher) release(c *call) {
	if c.look {
		return
	}
	for i := range c.plan.buckets {
		w := c.plan.buckets[i].whole()
		if b.users[w]--; b.users[w] == 0 {
			delete(b.users, w)
		}
	}
}

// finish answers the call, unless it was answered before or its caller has left.
func (c *call) finish(err error) {
	if c.stage.CompareAndSwap(stageAboard, stageAnswered) {
		c.err = err
		c.flight.alive.Add(-1)
		c.done <- struct{}{}
	}
}

// result returns what the call was answered. What its flight panicked with goes on in its caller, as it would
// have had the caller run the statement.
func (c *call) result() error {
	if c.panicked != nil {
		panic(c.panicked)
	}
	return c.err
}

// close lets no more calls in, and waits for those that are in, or until ctx ends.
func (b *batcher) close(ctx context.Context) error {
	b.shut.Store(true)
	b.mu.Lock()
	if !b.closed {
		b.closed = true
		if b.flights == 0 {
			close(b.landed)
		}
	}
	b.mu.Unlock()
	select {
	case <-b.landed:
		return nil
	default:
	}
	select {
	case <-b.landed:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// isClosed reports whether calls are let in no more.
func (b *batcher) isClosed() bool { return b.shut.Load() }

// whole names the bucket, on however many rows it is.
func (b *bucket) whole() which { return which{b.limit.name, b.key, 0} }
