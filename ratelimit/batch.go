package ratelimit

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
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

	ctx      context.Context //nolint:containedctx // the batch that answers the call carries on its values
	deadline time.Time       // when it ends unless ctx ends it sooner; none when zero
	done     chan struct{}
	stage    atomic.Int32
	flight   *flight
	left     bool    // whether its flight was told that the caller gave up
	blocker  *flight // the late flight that it waits behind; nil: it is in the queue, or waits no more
	uses     []*use  // what it asks for, until it is aboard or has left
	oneUse   [1]*use // what uses is when there is one bucket
	waits    int     // how many rows it has waited for
	arrival  uint64  // its number, in the order of arrival
	seat     int     // its place in the flight, in that order
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
	// alone answers c, and waits for the rows that somebody holds.
	alone(ctx context.Context, c *call) error
	// solo answers c, and waits for its row when it needs only one; or returns it when it needs several and
	// somebody holds one of them.
	solo(ctx context.Context, c *call) ([]behind, error)
	// fly answers calls, and returns those that need a row which somebody holds. When waitFor is not nil, all of
	// them need that row, and it waits for it.
	fly(ctx context.Context, calls []*call, waitFor *bucket.Key) []behind
}

// batcher folds concurrent calls into batches. A call that finds nothing in its way runs at once and by
// itself; those that come while all flights are out wait for the next one to land, and leave together.
// Nothing is held back for company. The calls for one bucket are answered in the order in which they came: a
// bucket is in one flight at a time, and a call does not overtake an earlier one for any of its buckets, unless
// the earlier one waits for a row that somebody holds. (Of a bucket that is spread over several rows one may be waited
// for while others are taken from.)
//
// No flight waits for a row while it holds another. A call that needs a row which somebody holds goes on to a
// flight of its own, which waits for that row and keeps no bucket but that row's from others.
type batcher struct {
	decider decider
	limit   int           // calls that may wait
	timeout time.Duration // that a call may wait for its answer; none when it is not above 0
	spare   sync.Pool     // of *chan struct{}, for call.done

	mu       sync.Mutex
	queue    []*call             // in the order they came; some have left
	queued   int                 // those that have not
	parked   int                 // calls that wait behind late flights
	arrivals uint64              // calls so far
	uses     map[bucket.Key]*use // the buckets that a call waits for, or a flight keeps from others
	unused   []*use
	flights  int // out, or about to leave
	out      []*flight
	late     int         // flights that are
	wide     int         // flights that are out for more than one bucket
	watching bool        // for flights that are late
	sweeping bool        // for calls whose time is over
	shut     atomic.Bool // closed, for those who do not wait in the queue
	closed   bool
	landed   chan struct{} // closed when the last flight has landed after Close
}

func newBatcher(l *Limiter) *batcher {
	return &batcher{
		decider: l, limit: l.config.MaxWaiting, timeout: l.config.Timeout,
		uses: make(map[bucket.Key]*use), landed: make(chan struct{}),
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
	c.ctx, c.deadline = ctx, b.deadline(ctx)
	done, _ := b.spare.Get().(*chan struct{})
	if done == nil {
		done = new(chan struct{})
		*done = make(chan struct{}, 1)
	}
	c.done = *done
	defer b.spare.Put(done) // nobody answers a call that has its answer, or was left
	departs, err := b.enqueue(c)
	if err != nil {
		return err
	}
	if departs {
		runtime.Gosched() // those who are about to call may come along; when nobody is, this takes no time
		f := b.depart(nil, nil)
		switch {
		case f != nil && len(f.calls) == 1 && f.calls[0] == c && !(c.simple() && c.plan.sharded()): // another of its rows may be free
			if answered, err := b.solo(ctx, f); answered {
				return err
			}
			return b.wait(ctx, c)
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
		b.flights--
		b.signal()
	}()
	return b.decider.alone(ctx, c)
}

// enqueue adds c to the queue. departs is true when a flight is to leave for it.
func (b *batcher) enqueue(c *call) (departs bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.full() && b.findLate() {
		b.send()
	}
	b.addUses(c)
	departs = !b.full() && !c.inUse()
	switch {
	case b.closed:
		b.dropUses(c)
		return false, ErrClosed
	case !departs && b.queued+b.parked >= b.limit:
		b.dropUses(c)
		return false, fmt.Errorf("%w (%d)", ErrOverloaded, b.queued+b.parked)
	}
	if c.done == nil {
		c.done = make(chan struct{}, 1)
	}
	b.sweep()
	b.arrivals++
	c.arrival = b.arrivals
	if f := c.keeper(); f != nil && f.late && !c.isQueuedFor(f) {
		b.park(c, f)
		return false, nil
	}
	b.queue = append(b.queue, c)
	b.count(c, 1)
	if departs {
		b.flights++
	} else {
		b.watch()
	}
	return departs, nil
}

// count adds a call to the queue's counts, or takes it out with n = -1.
func (b *batcher) count(c *call, n int) {
	b.queued += n
	for _, u := range c.uses {
		u.queued += n
	}
}

// wait waits until c is answered, or its context ends.
func (b *batcher) wait(ctx context.Context, c *call) error {
	select {
	case <-c.done:
		return c.result()
	case <-ctx.Done():
	}
	b.mu.Lock()
	left := b.giveUp(c)
	b.mu.Unlock()
	if left {
		return ctx.Err()
	}
	<-c.done // it was answered this moment
	return c.result()
}

// giveUp ends the wait of a call that has no answer, and reports whether it had none.
func (b *batcher) giveUp(c *call) bool {
	switch {
	case c.stage.CompareAndSwap(stageWaiting, stageLeft):
		b.leave(c)
	case c.stage.CompareAndSwap(stageAboard, stageLeft):
		c.left = true
		if c.flight.alive.Add(-1) == 0 {
			c.flight.cancel()
		}
	default:
		return false
	}
	return true
}

// leave forgets a call whose caller gave up before it was aboard.
func (b *batcher) leave(c *call) {
	defer b.dropUses(c)
	if f := c.blocker; f != nil {
		b.parked--
		f.parked--
		f.behind = withoutLeft(f.behind, f.parked)
		return
	}
	b.count(c, -1)
	b.queue = withoutLeft(b.queue, b.queued)
	if c.inUse() { // by calls behind it, some of which may have waited for c alone
		b.send()
	}
}

// withoutLeft returns the calls without those that have left, once these are most of them. n have not.
func withoutLeft(calls []*call, n int) []*call {
	if len(calls) <= 2*n+64 {
		return calls
	}
	kept := calls[:0]
	for _, c := range calls {
		if c.stage.Load() != stageLeft {
			kept = append(kept, c)
		}
	}
	clear(calls[len(kept):])
	return kept
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
		b.signal()
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

// signal tells Close when nothing is under way any more.
func (b *batcher) signal() {
	if b.closed && b.flights == 0 {
		close(b.landed)
	}
}

// isClosed reports whether calls are let in no more.
func (b *batcher) isClosed() bool { return b.shut.Load() }
