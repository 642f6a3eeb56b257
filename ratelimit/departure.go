package ratelimit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

const (
	// maxFlights is how many batches are on their way at once: while the server works on one, another is
	// written and read. More of them are smaller ones: on two cores, with 64 callers, two answered 34,000 calls a
	// second, one 25,000, three 29,000 and four 25,000.
	maxFlights = 2
	// maxAboard bounds the calls of one batch.
	maxAboard = 1000

	// A flight is late when it seems to wait for a row that somebody holds, as those for a single bucket do, or for
	// the server or a connection. The calls for other buckets need not wait for that, so it does not count as one of
	// maxFlights any more.
	lateAfter     = 10 * time.Millisecond // for a single bucket
	wideLateAfter = 50 * time.Millisecond // for more

	// maxOut bounds the flights for more than one bucket, those that are late included: they wait for the server.
	maxOut = 16
)

// errAbandoned is what calls get whose flight was ended by runtime.Goexit in a hook of the pool or the clock.
var errAbandoned = errors.New("the goroutine of the batch has exited")

// flight is a batch on its way.
type flight struct {
	calls   []*call
	alive   atomic.Int32 // calls that are not answered, and whose callers wait
	cancel  context.CancelFunc
	left    time.Time
	late    bool
	waitFor *bucket.Key // the row that it waits for; it is late from the beginning then

	keeps   []*use // the buckets that it keeps from others
	oneKeep [1]*use
	behind  []*call // calls for one of them that wait, once it is late; some have left
	parked  int     // those that have not
}

// full reports whether no more flights may leave.
func (b *batcher) full() bool { return b.flights-b.late >= maxFlights || b.wide >= maxOut }

// depart ends the flight that has landed, if any, sends those of its calls that wait for a row on, and returns the
// next flight in its place: nil when nobody waits who can leave.
func (b *batcher) depart(landed *flight, waiting []behind) *flight {
	b.mu.Lock()
	defer b.mu.Unlock()
	defer b.signal()
	if landed != nil {
		b.land(landed)
		b.forward(waiting)
		if b.full() {
			b.watch()
			return nil
		}
		b.flights++
	}
	return b.takeOff()
}

// land releases what the flight held, and puts the calls that wait behind it back in their places in the queue.
func (b *batcher) land(f *flight) {
	b.flights--
	if f.late {
		b.late--
	}
	if len(f.keeps) > 1 {
		b.wide--
	}
	b.out = slices.DeleteFunc(b.out, func(o *flight) bool { return o == f })
	b.letGo(f)
	if len(f.behind) == 0 {
		return
	}
	queue := make([]*call, 0, f.parked+len(b.queue))
	for _, c := range f.behind {
		if c.stage.Load() == stageLeft { // its caller is about to count it as gone from here
			continue
		}
		c.blocker = nil
		b.parked--
		f.parked--
		b.count(c, 1)
		queue = append(queue, c)
	}
	b.queue, f.behind = append(queue, b.queue...), nil
	slices.SortStableFunc(b.queue, func(c, d *call) int { return cmp.Compare(c.arrival, d.arrival) })
}

// forward sends calls on with flights of their own, one for each row that they wait for.
func (b *batcher) forward(waiting []behind) {
	byRow := make(map[bucket.Key]*flight)
	for _, w := range waiting {
		if w.call.left { // by itself it would not take any more, either
			continue
		}
		f := byRow[w.row]
		if f == nil {
			f = &flight{cancel: func() {}, left: time.Now(), late: true, waitFor: &w.row}
			if !w.sharded {
				if u := b.use(w.row.Whole()); u.flight == nil {
					f.keep(u)
				}
			}
			byRow[w.row] = f
		}
		w.call.flight = f
		f.calls = append(f.calls, w.call)
		f.alive.Add(1)
	}
	for _, f := range byRow {
		b.flights++
		b.late++
		b.out = append(b.out, f)
		go b.fly(f)
	}
}

// takeOff returns the next flight, which is counted already. It is nil, and counted no more, when nobody waits
// who can leave.
func (b *batcher) takeOff() *flight {
	defer b.watch()
	f := &flight{cancel: func() {}}
	if f.calls = b.board(); len(f.calls) == 0 {
		b.flights--
		return nil
	}
	f.alive.Store(int32(len(f.calls)))
	f.left = time.Now()
	b.out = append(b.out, f)
	for _, c := range f.calls {
		c.flight = f
		for _, u := range c.uses {
			f.keep(u)
		}
		b.dropUses(c)
	}
	if len(f.keeps) > 1 {
		b.wide++
	}
	return f
}

// board takes from the queue the calls of the next flight: those whose buckets are not aloft, nor asked for
// by an earlier call that stays. Those whose bucket is in a late flight wait behind that one, where they are in
// nobody's way.
func (b *batcher) board() []*call {
	var calls []*call
	var stay map[bucket.Key]struct{}
	kept := b.queue[:0]
	for i, c := range b.queue {
		if len(calls) == maxAboard {
			kept = append(kept, b.queue[i:]...)
			break
		}
		if c.stage.Load() == stageLeft {
			continue
		}
		f := c.keeper()
		switch {
		case f != nil && f.late:
			b.count(c, -1)
			b.park(c, f)
		case f != nil || c.isAfter(stay):
			if stay == nil {
				stay = make(map[bucket.Key]struct{})
			}
			for i := range c.plan.buckets {
				stay[c.plan.buckets[i].bucketKey()] = struct{}{}
			}
			kept = append(kept, c)
		case c.stage.CompareAndSwap(stageWaiting, stageAboard):
			calls = append(calls, c)
			b.count(c, -1)
		default: // it left this moment, and is being forgotten by its caller
		}
	}
	clear(b.queue[len(kept):])
	b.queue = kept
	return calls
}

// park has c wait behind a late flight.
func (b *batcher) park(c *call, f *flight) {
	c.blocker = f
	f.behind = append(f.behind, c)
	f.parked++
	b.parked++
}

// isAfter reports whether an earlier call asks for a bucket of c and stays.
func (c *call) isAfter(stay map[bucket.Key]struct{}) bool {
	if c.look || stay == nil {
		return false
	}
	return slices.ContainsFunc(c.plan.buckets, func(b ask) bool { _, found := stay[b.bucketKey()]; return found })
}

// send lets flights leave beside those that are out, while that may be and somebody waits who can.
func (b *batcher) send() {
	for b.queued > 0 && !b.full() {
		b.flights++
		f := b.takeOff()
		if f == nil {
			return
		}
		go b.fly(f)
	}
}

// watch sees to it that calls that wait for a flight to land do not wait for those that are late.
func (b *batcher) watch() {
	if b.watching || b.queued == 0 || b.flights == b.late {
		return
	}
	b.watching = true
	time.AfterFunc(lateAfter, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.watching = false
		if b.findLate() {
			b.send()
		}
		b.watch()
	})
}

// findLate finds the flights that are late by now, and reports whether there are new ones.
func (b *batcher) findLate() (found bool) {
	for _, f := range b.out {
		if !f.late && time.Since(f.left) >= f.lateAfter() {
			f.late, found = true, true
			b.late++
		}
	}
	return found
}

// lateAfter returns how long after it left the flight is late.
func (f *flight) lateAfter() time.Duration {
	if len(f.keeps) > 1 {
		return wideLateAfter
	}
	return lateAfter
}

// solo answers the one call of f on the goroutine of its caller, or sends it on with a flight that waits for a row.
func (b *batcher) solo(ctx context.Context, f *flight) (answered bool, err error) {
	var waiting []behind
	defer func() { // whatever ends it, a panic too, those behind it go on
		if next := b.depart(f, waiting); next != nil {
			go b.fly(next)
		}
	}()
	c := f.calls[0]
	waiting, err = b.decider.solo(ctx, c)
	if len(waiting) == 0 && !c.stage.CompareAndSwap(stageAboard, stageAnswered) {
		<-c.done // its time is over, but here is its answer
	}
	return len(waiting) == 0, err
}

// fly answers the calls of f, and then those of the flights that follow in its place.
func (b *batcher) fly(f *flight) {
	defer func() {
		if f == nil {
			return
		}
		f.abandon(recover())
		if next := b.depart(f, nil); next != nil {
			go b.fly(next)
		}
	}()
	for f != nil {
		ctx, cancel := context.WithCancel(context.WithoutCancel(f.calls[0].ctx))
		b.mu.Lock()
		f.cancel = cancel
		if f.alive.Load() == 0 {
			cancel()
		}
		b.mu.Unlock()
		waiting := b.decider.fly(ctx, f.calls, f.waitFor)
		cancel()
		f = b.depart(f, waiting)
	}
}

// abandon answers the calls that are left of a flight that panicked, or whose goroutine exits.
func (f *flight) abandon(panicked any) {
	if panicked != nil {
		panicked = fmt.Sprintf("%v\n\n%s", panicked, debug.Stack())
	}
	for _, c := range f.calls {
		if c.stage.Load() == stageAboard {
			c.panicked = panicked
			c.finish(errAbandoned)
		}
	}
}
