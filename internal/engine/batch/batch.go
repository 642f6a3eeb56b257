package batch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

const (
	// maxRunning is how many batches are in flight at once: while the server works on one, another is written and read.
	// More batches are smaller ones. On two cores, with 64 callers, two answered 34,000 calls a second, one 25,000, three
	// 29,000 and four 25,000.
	maxRunning = 2
	// maxCalls bounds the calls of one batch.
	maxCalls = 1000

	// A batch is slow if it seems to wait for a locked row, as a batch for a single bucket may, or for the server or a
	// connection. Calls for other buckets need not wait for it, so it no longer counts towards maxRunning.
	slowAfter     = 10 * time.Millisecond // for a single bucket
	wideSlowAfter = 50 * time.Millisecond // for more

	// maxWide bounds the batches for more than one bucket, including slow ones: they wait for the server.
	maxWide = 16
)

// ErrAbandoned is what calls get whose batch was ended by runtime.Goexit in a hook of the pool or the clock.
var ErrAbandoned = errors.New("the goroutine of the batch has exited")

// batch are calls that are answered together.
type batch[T any] struct {
	calls      []*Call[T]
	unanswered atomic.Int32 // calls without an answer whose callers wait
	cancel     context.CancelFunc
	started    time.Time
	slow       bool
	inline     bool        // whether it runs on the goroutine of its only caller
	overdue    bool        // whether it is inline and was cancelled because the time for its call was over
	waitFor    *bucket.Key // the row that it waits for; the batch is slow from the beginning then

	keeps   []*use[T] // the buckets that it keeps from others
	oneKeep [1]*use[T]
	parked  []*Call[T] // calls for one of them that wait, once the batch is slow; some have left
	waiting int        // calls in parked that have not left
}

// noCancel is the cancel of a batch that has nothing to cancel yet. A function literal in a generic function is an
// allocation.
func noCancel() {}

// next ends the batch that has done its work, if there is one, and sends its blocked calls on. It returns the
// batch that starts in its place: nil when no call waits that can be answered now.
func (b *Batcher[T]) next(done *batch[T], blocked []Blocked[T]) *batch[T] {
	b.mu.Lock()
	defer b.mu.Unlock()
	defer b.signal()
	if done != nil {
		b.end(done)
		if len(blocked) > 0 {
			b.forward(blocked)
		}
		if b.full() {
			b.armSlowTimer()
			return nil
		}
		b.batches++
	}
	return b.start()
}

// signal notifies Close when nothing is in progress any more.
func (b *Batcher[T]) signal() {
	if b.closed && b.batches == 0 && b.others == 0 {
		close(b.ended)
	}
}

// end releases the buckets that the batch kept, and puts the calls that wait behind it back in their places in the
// queue.
func (b *Batcher[T]) end(f *batch[T]) {
	b.batches--
	if f.slow {
		b.slow--
	}
	if len(f.keeps) > 1 {
		b.wide--
	}
	b.inFlight = slices.DeleteFunc(b.inFlight, func(o *batch[T]) bool { return o == f })
	b.letGo(f)
	if len(f.parked) == 0 {
		return
	}
	queue := make([]*Call[T], 0, f.waiting+len(b.queue))
	for _, c := range f.parked {
		if c.stage.Load() == stageLeft { // its caller is about to count it as gone from here
			continue
		}
		c.blocker = nil
		b.parked--
		f.waiting--
		b.count(c, 1)
		queue = append(queue, c)
	}
	b.queue, f.parked = append(queue, b.queue...), nil
	slices.SortStableFunc(b.queue, func(c, d *Call[T]) int { return cmp.Compare(c.arrival, d.arrival) })
}

// forward sends blocked calls on with batches of their own, one for each row that they wait for.
func (b *Batcher[T]) forward(blocked []Blocked[T]) {
	byRow := make(map[bucket.Key]*batch[T])
	for _, w := range blocked {
		if w.Call.left { // by itself it would not take any more, either
			continue
		}
		if w.Call.unclaim() {
			w.Call.Answer(w.Call.ctx.Err())
			continue
		}
		f := byRow[w.Row]
		if f == nil {
			f = &batch[T]{cancel: noCancel, started: time.Now(), slow: true, waitFor: &w.Row}
			if u := b.use(w.Row); u.batch == nil {
				f.keep(u)
			}
			byRow[w.Row] = f
		}
		w.Call.batch = f
		w.Call.holders.Add(1)
		f.calls = append(f.calls, w.Call)
		f.unanswered.Add(1)
	}
	for _, f := range byRow {
		b.batches++
		b.slow++
		b.inFlight = append(b.inFlight, f)
		go b.runAll(f)
	}
}

// start returns the next batch, which is counted already. When no call waits that can be answered now, start returns
// nil, and counts it no more.
func (b *Batcher[T]) start() *batch[T] {
	defer b.armSlowTimer()
	calls := b.pick()
	if len(calls) == 0 {
		b.batches--
		return nil
	}
	return b.launch(calls)
}

func (b *Batcher[T]) launch(calls []*Call[T]) *batch[T] {
	f := &calls[0].own
	if len(calls) > 1 {
		f = &batch[T]{}
	}
	f.calls, f.cancel = calls, noCancel
	f.unanswered.Store(int32(len(f.calls)))
	f.started = time.Now()
	b.inFlight = append(b.inFlight, f)
	for _, c := range f.calls {
		c.batch = f
		c.holders.Add(1)
		for _, n := range c.needs {
			f.keep(n.use)
		}
		b.dropUses(c)
	}
	if len(f.keeps) > 1 {
		b.wide++
	}
	return f
}

// pick takes the calls of the next batch from the queue: calls whose buckets are in no batch and in no earlier call of
// the queue. A call for a bucket that a slow batch keeps is parked behind that batch, where it blocks no other call.
func (b *Batcher[T]) pick() []*Call[T] {
	var calls []*Call[T]
	var stay map[bucket.Key]struct{}
	kept := b.queue[:0]
	for i, c := range b.queue {
		if len(calls) == maxCalls {
			kept = append(kept, b.queue[i:]...)
			break
		}
		if c.stage.Load() == stageLeft {
			continue
		}
		f := c.keeper()
		switch {
		case f != nil && f.slow:
			b.count(c, -1)
			b.park(c, f)
		case f != nil || stay != nil && c.isAfter(stay):
			if stay == nil {
				stay = make(map[bucket.Key]struct{})
			}
			for _, n := range c.needs {
				stay[n.key] = struct{}{}
			}
			kept = append(kept, c)
		case c.stage.CompareAndSwap(stageWaiting, stageInBatch):
			if calls == nil {
				calls = c.room(min(b.queued, maxCalls))
			}
			calls = append(calls, c)
			b.count(c, -1)
		default: // it left this moment, and is being forgotten by its caller
		}
	}
	clear(b.queue[len(kept):])
	b.queue = kept
	return calls
}

// park has c wait behind a slow batch.
func (b *Batcher[T]) park(c *Call[T], f *batch[T]) {
	c.blocker = f
	f.parked = append(f.parked, c)
	f.waiting++
	b.parked++
}

func (c *Call[T]) isAfter(stay map[bucket.Key]struct{}) bool {
	return slices.ContainsFunc(c.needs, func(n need[T]) bool { _, found := stay[n.key]; return found })
}

// startAll starts batches beside the running ones, while that is allowed and waiting calls can be answered.
func (b *Batcher[T]) startAll() {
	for b.queued > 0 && !b.full() {
		b.batches++
		f := b.start()
		if f == nil {
			return
		}
		go b.runAll(f)
	}
}

// armSlowTimer makes sure that calls which wait for the end of a batch do not wait for slow batches.
func (b *Batcher[T]) armSlowTimer() {
	if b.slowTimer || b.queued == 0 || b.batches == b.slow {
		return
	}
	b.slowTimer = true
	time.AfterFunc(slowAfter, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.slowTimer = false
		if b.findSlow() {
			b.startAll()
		}
		b.armSlowTimer()
	})
}

// findSlow finds the batches that are slow by now, and reports whether there are new ones.
func (b *Batcher[T]) findSlow() (found bool) {
	for _, f := range b.inFlight {
		if !f.slow && time.Since(f.started) >= f.slowAfter() {
			f.slow, found = true, true
			b.slow++
		}
	}
	return found
}

func (f *batch[T]) slowAfter() time.Duration {
	if len(f.keeps) > 1 {
		return wideSlowAfter
	}
	return slowAfter
}

// runAll answers the calls of f, and of the batches that follow in its place.
func (b *Batcher[T]) runAll(f *batch[T]) {
	for f != nil {
		f = b.run(f, false)
	}
}

// runInline answers the one call of f on the goroutine of its caller. It returns false if the call waits for a row.
func (b *Batcher[T]) runInline(f *batch[T]) (err error, answered bool) { //nolint:revive // the error is the answer
	c := f.calls[0]
	if next := b.run(f, true); next != nil {
		go b.runAll(next)
	}
	select {
	case <-c.done:
	default:
		return nil, false
	}
	if err = c.result(); f.overdue && errors.Is(err, context.Canceled) {
		err = context.DeadlineExceeded // its caller has not cancelled the call
	}
	return err, true
}

// run answers the calls of f, and returns the batch that starts in its place. If inline is set, it runs on the
// goroutine of its only caller, and ends with that caller's context.
func (b *Batcher[T]) run(f *batch[T], inline bool) (next *batch[T]) {
	ctx := f.calls[0].ctx
	if !inline {
		ctx = context.WithoutCancel(ctx)
	}
	ctx, cancel := context.WithCancel(ctx)
	finished := false
	defer func() {
		cancel()
		if finished {
			return
		}
		f.abandon(recover())
		if next := b.next(f, nil); next != nil {
			go b.runAll(next)
		}
	}()
	b.mu.Lock()
	if f.cancel = cancel; f.unanswered.Load() == 0 {
		cancel()
	}
	f.inline = inline
	b.mu.Unlock()
	blocked := b.decider.Run(ctx, f.of(), f.waitFor)
	cancel()
	if !inline {
		runtime.Gosched() // so that callers who come back at once go along, and do not wait for another batch
	}
	calls := f.calls // which may be a part of the only one of them, as f may
	next, finished = b.next(f, blocked), true
	for _, c := range calls {
		c.Done()
	}
	return next
}

func (f *batch[T]) of() []*T {
	if len(f.calls) == 1 {
		c := f.calls[0]
		c.oneOf[0] = c.Of
		return c.oneOf[:]
	}
	of := make([]*T, len(f.calls))
	for i, c := range f.calls {
		of[i] = c.Of
	}
	return of
}

// abandon answers the calls that are left of a batch that panicked, or whose goroutine exits.
func (f *batch[T]) abandon(panicked any) {
	if panicked != nil && !f.inline { // else it panics on the goroutine of its caller, with the same value
		panicked = fmt.Sprintf("%v\n\n%s", panicked, debug.Stack())
	}
	for _, c := range f.calls {
		switch c.stage.Load() {
		case stageInBatch, stageClaimed, stageGivenUp:
			c.panicked = panicked
			c.Answer(ErrAbandoned)
		}
	}
}

// full reports whether no more batches may start.
func (b *Batcher[T]) full() bool { return b.batches-b.slow >= maxRunning || b.wide >= maxWide }

// end makes the call answered, unless its caller gave up.
func (c *Call[T]) end() bool {
	return c.stage.CompareAndSwap(stageInBatch, stageAnswered) || c.stage.CompareAndSwap(stageClaimed, stageAnswered)
}

// room returns the room for the calls of a batch that c is the first of.
func (c *Call[T]) room(n int) []*Call[T] {
	if n == 1 {
		return c.oneCall[:0]
	}
	return make([]*Call[T], 0, n)
}
