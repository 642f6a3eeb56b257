package batch

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// Call is one call that a Batcher answers. Its owner makes it a part of what the call is about, so that the two are one
// allocation. A Call is used once.
type Call[T any] struct {
	// Of is what the call is about, for the Decider.
	Of *T
	// HasShards is whether the call takes from one bucket that has several rows. As one row may be held and another free,
	// it then goes to Decider.Run also when it is the only call of its batch.
	HasShards bool

	needs   []need[T]  // what it takes from, until it is in a batch or has left
	oneNeed [1]need[T] // what needs is when there is one

	err      error
	panicked any // what its batch panicked with

	ctx      context.Context //nolint:containedctx // the batch that answers the call carries on its values
	deadline time.Time       // when it ends unless ctx ends it sooner; none when zero
	done     chan struct{}
	stage    atomic.Int32
	batch    *batch[T]
	left     bool      // whether its batch was told that the caller gave up
	blocker  *batch[T] // the slow batch that it waits behind; nil: it is in the queue, or waits no more
	arrival  uint64    // its number, in the order of arrival
}

// need is a bucket that a call takes from.
type need[T any] struct {
	key bucket.Key
	use *use[T]
}

// Needs names the n whole buckets that the call takes from, each once. A call that only looks needs none.
func (c *Call[T]) Needs(n int, key func(i int) bucket.Key) {
	if c.needs = c.oneNeed[:0]; n > 1 {
		c.needs = make([]need[T], 0, n)
	}
	for i := range n {
		c.needs = append(c.needs, need[T]{key: key(i)})
	}
}

// Blocked is a call that cannot be answered yet, because somebody holds a row that it needs.
type Blocked[T any] struct {
	Call *Call[T]
	Row  bucket.Key
	// OfSeveral is whether the bucket has other rows, which may be free.
	OfSeveral bool
}

// The stages of a call that waits. The last two are final.
const (
	stageWaiting  int32 = iota
	stageInBatch        // the batch is on its way
	stageAnswered       // by its batch
	stageLeft           // its caller gave up
)

// Answer answers the call, unless it was answered before or its caller has left.
func (c *Call[T]) Answer(err error) {
	if c.stage.CompareAndSwap(stageInBatch, stageAnswered) {
		c.err = err
		c.batch.unanswered.Add(-1)
		c.done <- struct{}{}
	}
}

// StartAlone makes the call a batch that no Batcher runs, so that a Decider can be tried by itself. Result waits for what
// it answers.
func (c *Call[T]) StartAlone() {
	c.batch, c.done = &batch[T]{calls: []*Call[T]{c}, cancel: noCancel}, make(chan struct{}, 1)
	c.stage.Store(stageInBatch)
}

// Result waits for the answer to a call of StartAlone.
func (c *Call[T]) Result() error {
	<-c.done
	return c.result()
}

// result returns what the call was answered. What its batch panicked with goes on in its caller, as it would
// have had the caller run the statement.
func (c *Call[T]) result() error {
	if c.panicked != nil {
		panic(c.panicked)
	}
	return c.err
}

// use is what a Batcher knows of a bucket while a call waits for it, or a batch keeps it from others.
type use[T any] struct {
	key    bucket.Key
	calls  int       // that wait for it
	queued int       // those of them in the queue, and not behind a slow batch
	batch  *batch[T] // that keeps it from others
}

// maxUnused bounds the uses that a Batcher keeps for the next buckets.
const maxUnused = 1000

// use returns what is known of a bucket, which is nothing yet where nobody uses it.
func (b *Batcher[T]) use(key bucket.Key) *use[T] {
	u := b.uses[key]
	if u != nil {
		return u
	}
	if n := len(b.unused); n > 0 {
		u, b.unused = b.unused[n-1], b.unused[:n-1]
	} else {
		u = &use[T]{}
	}
	u.key = key
	b.uses[key] = u
	return u
}

// dropUnused forgets a bucket that nobody uses any more.
func (b *Batcher[T]) dropUnused(u *use[T]) {
	if u.calls > 0 || u.batch != nil {
		return
	}
	delete(b.uses, u.key)
	if *u = (use[T]{}); len(b.unused) < maxUnused {
		b.unused = append(b.unused, u)
	}
}

// addUses notes that c waits for its buckets.
func (b *Batcher[T]) addUses(c *Call[T]) {
	for i := range c.needs {
		u := b.use(c.needs[i].key)
		u.calls++
		c.needs[i].use = u
	}
}

// dropUses notes that c waits for its buckets no more.
func (b *Batcher[T]) dropUses(c *Call[T]) {
	for _, n := range c.needs {
		n.use.calls--
		b.dropUnused(n.use)
	}
	c.needs = nil
}

// count adds a call to the queue's counts, or takes it out with n = -1.
func (b *Batcher[T]) count(c *Call[T], n int) {
	b.queued += n
	for i := range c.needs {
		c.needs[i].use.queued += n
	}
}

// inUse reports whether an earlier call, in the queue or in a batch that keeps its bucket from others, asks for a
// bucket of c.
func (c *Call[T]) inUse() bool { return c.isQueuedFor(nil) || c.keeper() != nil }

// isQueuedFor reports whether a call in the queue asks for a bucket of c. When f is not nil, only the buckets that f keeps
// count.
func (c *Call[T]) isQueuedFor(f *batch[T]) bool {
	for _, n := range c.needs {
		if n.use.queued > 0 && (f == nil || n.use.batch == f) {
			return true
		}
	}
	return false
}

// keeper returns a batch that keeps a bucket of c from others, a slow one if there is one, or nil.
func (c *Call[T]) keeper() (keeper *batch[T]) {
	for _, n := range c.needs {
		if f := n.use.batch; f != nil && (keeper == nil || f.slow) {
			keeper = f
		}
	}
	return keeper
}

// keep keeps a bucket from others while the batch is in flight.
func (f *batch[T]) keep(u *use[T]) {
	if u.batch == f {
		return
	}
	if f.keeps == nil {
		f.keeps = f.oneKeep[:0]
	}
	u.batch = f
	f.keeps = append(f.keeps, u)
}

// letGo lets others have the buckets that the batch has kept from them.
func (b *Batcher[T]) letGo(f *batch[T]) {
	for _, u := range f.keeps {
		u.batch = nil
		b.dropUnused(u)
	}
	f.keeps = nil
}
