package ratelimit

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
)

const (
	// maxFlights is how many batches are on their way at once: while the server works on one, another is
	// written and the answers to a third are read. More of them are smaller ones.
	maxFlights = 3
	// maxAboard bounds the calls of one batch.
	maxAboard = 1000
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

	ctx    context.Context //nolint:containedctx // the batch that answers the call carries on its values
	done   chan struct{}
	stage  atomic.Int32
	flight *flight
	seat   int // its place in the flight, in the order of arrival
}

// The stages of a call that waits.
const (
	stageWaiting int32 = iota
	stageAboard        // of a batch
	stageLeft          // its caller gave up
)

// batcher folds concurrent calls into batches. A call that finds nothing in its way runs at once and by
// itself; those that come while all flights are out wait for the next one to land, and leave together.
// Nothing waits for a timer. The calls for one bucket are answered in the order in which they came: a
// bucket is in one flight at a time, and a call does not overtake an earlier one for any of its buckets.
type batcher struct {
	limiter *Limiter
	limit   int // calls that may wait

	mu      sync.Mutex
	queue   []*call            // in the order they came; some have left
	queued  int                // those that have not
	users   map[which]int      // calls, in the queue or aloft, for each bucket
	aloft   map[which]struct{} // buckets of the flights
	flights int
	closed  bool
	landed  chan struct{} // closed when the last flight has landed after Close
}

// flight is a batch on its way.
type flight struct {
	calls  []*call
	alive  int // calls whose callers still wait
	cancel context.CancelFunc
}

func newBatcher(l *Limiter) *batcher {
	return &batcher{
		limiter: l, limit: l.config.MaxWaiting,
		users: make(map[which]int), aloft: make(map[which]struct{}), landed: make(chan struct{}),
	}
}

// batches reports whether calls are folded: not on a single connection, which one caller at a time can use.
func (l *Limiter) batches() bool {
	_, single := l.pool.(*pgx.Conn)
	return !l.config.NoBatching && !single
}

// do answers c, by itself or as one of a batch.
func (b *batcher) do(ctx context.Context, c *call) error {
	if !b.limiter.batches() {
		return b.limiter.alone(ctx, c)
	}
	c.ctx = ctx
	departs, err := b.enqueue(c)
	if err != nil {
		return err
	}
	if departs {
		runtime.Gosched() // those who are about to call may come along; when nobody is, this takes no time
		f := b.depart(nil)
		switch {
		case f != nil && len(f.calls) == 1 && f.calls[0] == c:
			err := b.limiter.alone(ctx, c)
			if next := b.depart(f); next != nil {
				go b.fly(next)
			}
			return err
		case f != nil:
			go b.fly(f)
		}
	}
	return b.wait(ctx, c)
}

// enqueue adds c to the queue. departs is true when a flight is to leave for it.
func (b *batcher) enqueue(c *call) (departs bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.closed:
		return false, ErrClosed
	case b.queued >= b.limit:
		return false, fmt.Errorf("%w (%d)", ErrOverloaded, b.queued)
	}
	if c.done == nil {
		c.done = make(chan struct{}, 1)
	}
	departs = b.flights < maxFlights
	if !c.look {
		for i := range c.plan.buckets {
			w := c.plan.buckets[i].whole()
			departs = departs && b.users[w] == 0
			b.users[w]++
		}
	}
	b.queue = append(b.queue, c)
	b.queued++
	if departs {
		b.flights++
	}
	return departs, nil
}

// wait waits until c is answered or its context ends.
func (b *batcher) wait(ctx context.Context, c *call) error {
	select {
	case <-c.done:
		return c.err
	case <-ctx.Done():
	}
	if c.stage.CompareAndSwap(stageWaiting, stageLeft) {
		b.leave(c)
		return ctx.Err()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.flight.alive--; c.flight.alive == 0 {
		c.flight.cancel()
	}
	return ctx.Err()
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

// depart ends the flight that has landed, if any, and returns the next one in its place: nil when nobody
// waits who can leave.
func (b *batcher) depart(landed *flight) *flight {
	b.mu.Lock()
	defer b.mu.Unlock()
	if landed != nil {
		for _, c := range landed.calls {
			b.release(c)
			if !c.look {
				for i := range c.plan.buckets {
					delete(b.aloft, c.plan.buckets[i].whole())
				}
			}
		}
	}
	f := &flight{calls: b.board(), cancel: func() {}}
	if len(f.calls) == 0 {
		b.flights--
		if b.closed && b.flights == 0 {
			close(b.landed)
		}
		return nil
	}
	f.alive = len(f.calls)
	for _, c := range f.calls {
		c.flight = f
		if c.look {
			continue
		}
		for i := range c.plan.buckets {
			b.aloft[c.plan.buckets[i].whole()] = struct{}{}
		}
	}
	return f
}

// board takes from the queue the calls of the next flight: those whose buckets are not aloft, nor asked for
// by an earlier call that stays.
func (b *batcher) board() []*call {
	var calls []*call
	var stay map[which]struct{}
	kept := b.queue[:0]
	for i, c := range b.queue {
		switch {
		case len(calls) == maxAboard:
			kept = append(kept, b.queue[i:]...)
		case c.stage.Load() == stageLeft:
			continue
		case !c.look && b.blocked(c, stay):
			if stay == nil {
				stay = make(map[which]struct{})
			}
			for i := range c.plan.buckets {
				stay[c.plan.buckets[i].whole()] = struct{}{}
			}
			kept = append(kept, c)
			continue
		case c.stage.CompareAndSwap(stageWaiting, stageAboard):
			calls = append(calls, c)
			b.queued--
			continue
		default: // it left this moment, and is being forgotten by its caller
			continue
		}
		break
	}
	clear(b.queue[len(kept):])
	b.queue = kept
	return calls
}

// blocked reports whether c has to wait for a flight, or for a call before it that does.
func (b *batcher) blocked(c *call, stay map[which]struct{}) bool {
	for i := range c.plan.buckets {
		w := c.plan.buckets[i].whole()
		if _, found := b.aloft[w]; found {
			return true
		}
		if _, found := stay[w]; found {
			return true
		}
	}
	return false
}

// fly answers the calls of f, and then those of the flights that follow in its place.
func (b *batcher) fly(f *flight) {
	for ; f != nil; f = b.depart(f) {
		ctx, cancel := context.WithCancel(context.WithoutCancel(f.calls[0].ctx))
		b.mu.Lock()
		f.cancel = cancel
		if f.alive == 0 {
			cancel()
		}
		b.mu.Unlock()
		b.limiter.fly(ctx, f.calls)
		cancel()
	}
}

// finish answers the call.
func (c *call) finish(err error) {
	c.err = err
	c.done <- struct{}{}
}

// close lets no more calls in, and waits for those that are in, or until ctx ends.
func (b *batcher) close(ctx context.Context) error {
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
	case <-ctx.Done():
		return ctx.Err()
	}
}

// whole names the bucket, on however many rows it is.
func (b *bucket) whole() which { return which{b.limit.name, b.key, 0} }
