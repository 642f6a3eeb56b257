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
	// Several is whether the call goes to Decider.Run also when it is the only one of its batch: one row of its bucket
	// may be held, and another free.
	Several bool

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
	// OfSeveral is whether the row is one of those that its bucket has. The others may be free.
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
