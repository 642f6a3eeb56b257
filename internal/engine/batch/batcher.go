// Package batch folds concurrent calls into batches: it decides which calls wait, and which calls go together. It knows
// the keys of buckets, but not the content of their rows.
package batch

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// Decider answers calls.
type Decider[T any] interface {
	// Run answers the calls of a batch, each with Call.Answer, and returns the calls that need a row which another
	// transaction holds. If waitFor is not nil, all calls need that row, and Run waits for it.
	Run(ctx context.Context, calls []*T, waitFor *bucket.Key) []Blocked[T]
}

// Options are what a Batcher is made with.
type Options struct {
	Apart         func() bool   // reports whether each call is a batch of its own that waits for no other; nil: no
	MaxWaiting    int           // calls that may wait in the queue, and behind slow batches
	Timeout       time.Duration // that a call may wait for its answer; none when it is not above 0
	ErrClosed     error         // what calls get after Close
	ErrOverloaded error         // what calls get when as many wait already
}

// Batcher folds concurrent calls into batches. If no batch is in its way, a call runs at once and by itself. Calls that
// come while all batches are running wait until the next batch ends, and go together. No call is delayed to make a
// batch larger. But after a batch was answered, other goroutines may run once before the next batch takes the waiting
// calls. If callers return at once, half of them then go together, and not a third.
//
// The calls for one bucket are answered in the order in which they came. A bucket is in one batch at a time. A call
// does not overtake an earlier call for any of its buckets, unless the earlier call waits for a row that another
// transaction holds. If a bucket has several rows, some calls may wait for one row while others take from another.
//
// No batch waits for a row while it holds another. A call that needs a row which another transaction holds moves to a
// batch of its own. That batch waits for the row, and keeps only the row's bucket from others.
type Batcher[T any] struct {
	decider Decider[T]
	options Options
	spare   sync.Pool // of *chan struct{}, for Call.done
	made    time.Time // what Call.due counts from

	mu       sync.Mutex
	queue    []*Call[T]             // in the order they came; some have left
	queued   int                    // calls in the queue that have not left
	parked   int                    // calls that wait behind slow batches
	arrivals uint64                 // calls so far
	uses     map[bucket.Key]*use[T] // the buckets that a call waits for, or a batch keeps from others
	latest   *use[T]                // of uses, the last one used; nil: it was dropped
	unused   []*use[T]
	others   int // between Begin and End
	batches  int // in flight, or about to start
	inFlight []*batch[T]
	slow     int // batches in flight that are slow
	wide     int // batches that are in flight for more than one bucket
	closed   bool
	ended    chan struct{} // closed when the last batch has ended after Close

	slowTimer bool        // whether a timer looks for slow batches
	sweeping  bool        // whether a timer looks for calls whose time is over
	shut      atomic.Bool // closed, for calls outside the queue
}

// New returns a Batcher whose calls decider answers.
func New[T any](decider Decider[T], options Options) *Batcher[T] {
	return &Batcher[T]{
		decider: decider, options: options, made: time.Now(), uses: make(map[bucket.Key]*use[T]), ended: make(chan struct{}),
	}
}

// Do answers c, by itself or as one of a batch.
func (b *Batcher[T]) Do(ctx context.Context, c *Call[T]) error {
	switch {
	case c.OwnTime:
	case c.Awaited: // the timeout ends its context, so that only the context ends the call
		bounded, cancel := Bounded(ctx, b.options.Timeout)
		defer cancel()
		ctx = bounded
	default:
		c.due = b.due(ctx)
	}
	c.ctx = ctx
	done, _ := b.spare.Get().(*chan struct{})
	if done == nil {
		done = new(make(chan struct{}, 1))
	}
	c.done = *done
	defer func() { // no batch answers a call that has its answer, or was left
		select {
		case <-c.done: // an answer that nobody read, because a hook has ended this goroutine
		default:
		}
		b.spare.Put(done)
	}()
	f, err := b.enter(c)
	switch {
	case err != nil:
		return err
	case f != nil && len(f.calls) == 1 && f.calls[0] == c:
		if err, answered := b.runInline(f); answered {
			return err
		}
	case f != nil:
		go b.runAll(f)
	}
	return b.wait(ctx, c)
}

// enter adds c to the queue, and returns a batch that is to start now, if there is one.
func (b *Batcher[T]) enter(c *Call[T]) (*batch[T], error) {
	if b.options.Apart != nil && b.options.Apart() {
		return b.startApart(c)
	}
	starts, err := b.enqueue(c)
	if err != nil || !starts {
		return nil, err
	}
	runtime.Gosched() // other goroutines may make their calls; without any it takes no time
	return b.next(nil, nil), nil
}

// startApart returns a batch of c alone, which keeps no bucket from others. A Reserve from several buckets waits for
// the first of them, so that callers that need the same buckets stand in line there.
func (b *Batcher[T]) startApart(c *Call[T]) (*batch[T], error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil, b.options.ErrClosed
	}
	b.armTimeoutTimer(b.options.Timeout)
	b.batches++
	needs := c.needs
	c.needs = nil
	c.holders.Store(1)
	c.stage.Store(stageInBatch)
	f := b.launch(append(c.room(1), c))
	if c.Awaited && len(needs) > 1 {
		f.waitFor = &needs[0].key
	}
	return f, nil
}

// enqueue adds c to the queue. It reports whether a batch is to start for c.
func (b *Batcher[T]) enqueue(c *Call[T]) (starts bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.full() && b.findSlow() {
		b.startAll()
	}
	full := b.full()
	b.addUses(c)
	keeper := c.keeper()
	starts = !full && keeper == nil && !c.isQueuedFor(nil)
	behindSlow, waiting := keeper != nil && keeper.slow, b.queued
	if behindSlow { // those behind one such batch leave room for those behind another
		waiting = max(b.queued, b.parked, 2*keeper.waiting)
	}
	switch {
	case b.closed:
		b.dropUses(c)
		return false, b.options.ErrClosed
	case !starts && waiting >= b.options.MaxWaiting:
		b.dropUses(c)
		return false, fmt.Errorf("%w (%d)", b.options.ErrOverloaded, b.options.MaxWaiting)
	}
	if !b.sweeping {
		b.armTimeoutTimer(b.options.Timeout)
	}
	c.holders.Store(1)
	b.arrivals++
	c.arrival = b.arrivals
	if behindSlow && !c.isQueuedFor(keeper) {
		b.park(c, keeper)
		return false, nil
	}
	b.queue = append(b.queue, c)
	b.count(c, 1)
	if starts {
		b.batches++
	} else {
		b.armSlowTimer()
	}
	return starts, nil
}

// wait waits until c is answered, or its context ends.
func (b *Batcher[T]) wait(ctx context.Context, c *Call[T]) error {
	ended := ctx.Done()
	if ended == nil { // to wait for one takes half the time of a select
		<-c.done
		return c.result()
	}
	select {
	case <-c.done:
		return c.result()
	case <-ended:
	}
	b.mu.Lock()
	left := b.giveUp(c)
	b.mu.Unlock()
	if left {
		return ctx.Err()
	}
	<-c.done // it was answered this moment, or it is Awaited
	if err := c.result(); !errors.Is(err, context.Canceled) {
		return err
	}
	return ctx.Err() // all callers of the batch have given up, each for a reason of its own
}

// giveUp ends the wait of a call that has no answer, and reports whether it left. A call that is Awaited and was
// claimed does not leave, but its batch goes on only while another caller waits.
func (b *Batcher[T]) giveUp(c *Call[T]) bool {
	switch {
	case c.stage.CompareAndSwap(stageWaiting, stageLeft):
		b.leave(c)
	case c.stage.CompareAndSwap(stageInBatch, stageLeft):
		c.left = true
		c.batch.goWithout()
	case c.stage.CompareAndSwap(stageClaimed, stageGivenUp):
		c.batch.goWithout()
		return false
	default:
		return false
	}
	return true
}

// Withdraw answers a call with context.Canceled if it still waits for its batch. A call that its batch has goes on.
func (b *Batcher[T]) Withdraw(c *Call[T]) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.arrival > 0 && c.stage.CompareAndSwap(stageWaiting, stageLeft) {
		b.leave(c)
		c.err = context.Canceled
		c.done <- struct{}{}
	}
}

// goWithout ends the batch when the caller who gives up was the last who waited for it.
func (f *batch[T]) goWithout() {
	if f.unanswered.Add(-1) == 0 {
		f.cancel()
	}
}

// leave forgets a call whose caller gave up before it was in a batch.
func (b *Batcher[T]) leave(c *Call[T]) {
	defer b.dropUses(c)
	if f := c.blocker; f != nil {
		b.parked--
		f.waiting--
		f.parked = withoutLeft(f.parked, f.waiting)
		return
	}
	b.count(c, -1)
	b.queue = withoutLeft(b.queue, b.queued)
	if c.inUse() { // by calls behind it, some of which may have waited for c alone
		b.startAll()
	}
}

// withoutLeft removes the calls that have left, once they are the majority. n calls have not left.
func withoutLeft[T any](calls []*Call[T], n int) []*Call[T] {
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

// Begin makes Close wait for End. It returns false after Close.
func (b *Batcher[T]) Begin() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.closed {
		b.others++
	}
	return !b.closed
}

// End ends what Begin began.
func (b *Batcher[T]) End() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.others--
	b.signal()
}

// Close rejects new calls, and waits for the calls in progress, or until ctx ends.
func (b *Batcher[T]) Close(ctx context.Context) error {
	b.shut.Store(true)
	b.mu.Lock()
	if !b.closed {
		b.closed = true
		b.signal()
	}
	b.mu.Unlock()
	select {
	case <-b.ended:
		return nil
	default:
	}
	select {
	case <-b.ended:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// IsClosed reports whether calls are let in no more.
func (b *Batcher[T]) IsClosed() bool { return b.shut.Load() }

// sweepsPerTimeout is how often at most, in the time that a call has, one timer looks for calls whose time is over. The
// timer fires when the time of the oldest call is over, so only calls behind others end late, by up to a sixteenth of
// that time. A timer for each call took 3 % of the calls a second that 64 callers make.
const sweepsPerTimeout = 16

// Bounded returns ctx with the time that a call has: timeout, unless that is not above 0, or ctx ends sooner.
func Bounded(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	if !bounds(ctx, timeout) {
		return ctx, noCancel
	}
	return context.WithTimeout(ctx, timeout)
}

// bounds reports whether a call with ctx is to end after timeout.
func bounds(ctx context.Context, timeout time.Duration) bool {
	if timeout <= 0 {
		return false
	}
	deadline, ends := ctx.Deadline()
	return !ends || time.Until(deadline) > timeout
}

// due returns when a call that is made now ends, since the Batcher was made: to read that clock takes half the time. It
// is 0 when its context ends it sooner, or never.
func (b *Batcher[T]) due(ctx context.Context) time.Duration {
	if !bounds(ctx, b.options.Timeout) {
		return 0
	}
	return time.Since(b.made) + b.options.Timeout
}

// armTimeoutTimer ends the calls whose time is over, as long as there are calls. Its first look is a timeout from now.
func (b *Batcher[T]) armTimeoutTimer(wait time.Duration) {
	if b.sweeping || b.options.Timeout <= 0 {
		return
	}
	b.sweeping = true
	time.AfterFunc(wait, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.sweeping = false
		over, next := b.overdue(time.Since(b.made))
		for _, c := range over {
			switch f := c.batch; {
			case f != nil && f.inline: // its caller waits for it
				f.overdue = true
				f.cancel()
			case b.giveUp(c):
				c.err = context.DeadlineExceeded
				c.done <- struct{}{}
			}
		}
		if b.queued > 0 || len(b.inFlight) > 0 {
			b.armTimeoutTimer(max(next, b.options.Timeout/sweepsPerTimeout, time.Millisecond))
		}
	})
}

// overdue returns the calls whose time is over, and how long it takes until the next call's time is over.
func (b *Batcher[T]) overdue(now time.Duration) (over []*Call[T], next time.Duration) {
	next = b.options.Timeout
	add := func(calls []*Call[T]) {
		for _, c := range calls {
			switch {
			case c.due == 0:
			case now >= c.due:
				over = append(over, c)
			default:
				next = min(next, c.due-now)
			}
		}
	}
	add(b.queue)
	for _, f := range b.inFlight {
		add(f.calls)
		add(f.parked)
	}
	return over, next
}
