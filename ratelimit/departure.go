package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"time"
)

const (
	// maxFlights is how many batches are on their way at once: while the server works on one, another is
	// written and read. More of them are smaller ones: on two cores, with 64 callers, two answered 34,000 calls a
	// second, one 25,000, three 29,000 and four 25,000.
	maxFlights = 2
	// maxAboard bounds the calls of one batch.
	maxAboard = 1000

	// lateAfter is when a flight is late: it waits for a row that somebody holds, or for a connection. The calls
	// for other buckets need not wait for that, so it does not count as one of maxFlights any more.
	lateAfter = 50 * time.Millisecond
	// maxOut bounds the flights with those that are late.
	maxOut = 16
)

// errAbandoned is what calls get whose flight was ended by runtime.Goexit in a hook of the pool or the clock.
var errAbandoned = errors.New("the goroutine of the batch has exited")

// flight is a batch on its way.
type flight struct {
	calls  []*call
	alive  atomic.Int32 // calls that are not answered, and whose callers wait
	cancel context.CancelFunc
	left   time.Time
	late   bool
}

// full reports whether no more flights may leave.
func (b *batcher) full() bool { return b.flights-b.late >= maxFlights || b.flights >= maxOut }

// depart ends the flight that has landed, if any, and returns the next one in its place: nil when nobody
// waits who can leave.
func (b *batcher) depart(landed *flight) *flight {
	b.mu.Lock()
	defer b.mu.Unlock()
	if landed != nil {
		b.land(landed)
	}
	return b.takeOff()
}

// land releases what the flight held.
func (b *batcher) land(f *flight) {
	for _, c := range f.calls {
		b.release(c)
		if !c.look {
			for i := range c.plan.buckets {
				delete(b.aloft, c.plan.buckets[i].whole())
			}
		}
	}
	b.out = slices.DeleteFunc(b.out, func(o *flight) bool { return o == f })
	if f.late {
		b.late--
	}
}

// takeOff returns the next flight, which is counted already. It is nil, and counted no more, when nobody waits
// who can leave, and when enough others are out, now that one is back that was late.
func (b *batcher) takeOff() *flight {
	defer b.watch()
	f := &flight{cancel: func() {}}
	if b.flights-b.late <= maxFlights {
		f.calls = b.board()
	}
	if len(f.calls) == 0 {
		b.end()
		return nil
	}
	f.alive.Store(int32(len(f.calls)))
	f.left = time.Now()
	b.out = append(b.out, f)
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

// end counts a flight as landed.
func (b *batcher) end() {
	if b.flights--; b.closed && b.flights == 0 {
		close(b.landed)
	}
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
	if b.watching || b.queued == 0 || b.flights-b.late < maxFlights || b.flights >= maxOut {
		return
	}
	b.watching = true
	time.AfterFunc(lateAfter, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.watching = false
		for _, f := range b.out {
			if !f.late && time.Since(f.left) >= lateAfter {
				f.late = true
				b.late++
			}
		}
		b.send()
		b.watch()
	})
}

// solo answers the one call of f on the goroutine of its caller.
func (b *batcher) solo(ctx context.Context, f *flight) error {
	defer func() { // whatever ends it, a panic too, those behind it go on
		if next := b.depart(f); next != nil {
			go b.fly(next)
		}
	}()
	return b.decider.alone(ctx, f.calls[0])
}

// fly answers the calls of f, and then those of the flights that follow in its place.
func (b *batcher) fly(f *flight) {
	defer func() {
		if f == nil {
			return
		}
		f.abandon(recover())
		if next := b.depart(f); next != nil {
			go b.fly(next)
		}
	}()
	for ; f != nil; f = b.depart(f) {
		ctx, cancel := context.WithCancel(context.WithoutCancel(f.calls[0].ctx))
		b.mu.Lock()
		f.cancel = cancel
		if f.alive.Load() == 0 {
			cancel()
		}
		b.mu.Unlock()
		b.decider.fly(ctx, f.calls)
		cancel()
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
