package batch

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// Call is one call that a Batcher answers. Its owner embeds it in its own struct, so that the two are one
// allocation. A Call is used once.
type Call[T any] struct {
	// Of is the owner's struct, for the Decider.
	Of *T
	// Awaited is whether the caller still waits for the answer of a claimed call after its context has ended, so that the
	// call can be undone. A caller that gives up earlier leaves the call, and the batch does nothing for it.
	Awaited bool
	// OwnTime is whether Options.Timeout doesn't end the call, but only the context of Do.
	OwnTime bool
	// Owner reuses the call; nil: it is not reused. See Done.
	Owner Owner

	needs   []need[T]  // its buckets, until it is in a batch or has left
	oneNeed [1]need[T] // what needs is when there is one

	err      error
	panicked any // what its batch panicked with

	ctx     context.Context //nolint:containedctx // the batch that answers the call carries on its values
	due     time.Duration   // when it ends unless ctx ends it sooner, by Batcher.made; none when 0
	done    chan struct{}
	stage   atomic.Int32
	batch   *batch[T]
	own     batch[T]    // what batch is when it is picked by itself
	oneCall [1]*Call[T] // the calls of that
	oneOf   [1]*T       // the owner's structs of a batch of one call
	left    bool        // whether its batch knows that the caller gave up
	blocker *batch[T]   // the slow batch that it waits behind; nil: it is in the queue, or waits no more
	arrival uint64      // its number, in the order of arrival

	holders atomic.Int32 // its caller, and the batches that may look at it
}

// Owner reuses a call.
type Owner interface {
	// Free is called when neither the caller nor a batch uses the call any more.
	Free()
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

// Done says that the caller will not use the call again. Call it after Do has returned no error. A call whose caller
// does not say so is not used again, as when he left or panics while his batch may look at it.
func (c *Call[T]) Done() {
	if c.Owner != nil && c.holders.Add(-1) == 0 {
		c.Owner.Free()
	}
}

// Blocked is a call that cannot be answered yet, because another transaction holds a row that it needs.
type Blocked[T any] struct {
	Call *Call[T]
	Row  bucket.Key
}

// The stages of a call that waits. The last two are final.
const (
	stageWaiting  int32 = iota
	stageInBatch        // the batch is on its way
	stageClaimed        // a batch decides on it, and its caller gets the answer
	stageGivenUp        // it was claimed, its caller gave up, and waits for the answer all the same
	stageAnswered       // by its batch
	stageLeft           // its caller gave up
)

// Claim reports whether to decide on the call: it is false if the call is Awaited and its caller has left. The
// transaction that decides asks when it waits for nothing more.
func (c *Call[T]) Claim() bool {
	if !c.Awaited {
		return true
	}
	c.stage.CompareAndSwap(stageInBatch, stageClaimed)
	return c.stage.Load() != stageLeft
}

// Answer answers the call, unless it was answered before or its caller has left.
func (c *Call[T]) Answer(err error) {
	switch {
	case c.end(): // its caller waits
		c.err = err
		c.batch.unanswered.Add(-1)
	case c.stage.CompareAndSwap(stageGivenUp, stageAnswered):
		c.err = err
	default:
		return
	}
	c.done <- struct{}{}
}

// unclaim has a claimed call wait again, as nothing was done for it. It reports whether its caller gave up.
func (c *Call[T]) unclaim() (givenUp bool) {
	c.stage.CompareAndSwap(stageClaimed, stageInBatch)
	return c.stage.Load() == stageGivenUp
}

// StartAlone makes the call a batch that no Batcher runs, so that a Decider can be tested by itself. Result waits for
// the answer.
func (c *Call[T]) StartAlone() {
	c.batch, c.done = &batch[T]{calls: []*Call[T]{c}, cancel: noCancel}, make(chan struct{}, 1)
	c.stage.Store(stageInBatch)
}

// Leave makes the caller of a call of StartAlone give up. It returns false if the call is claimed or answered.
func (c *Call[T]) Leave() bool { return c.stage.CompareAndSwap(stageInBatch, stageLeft) }

// Result waits for the answer to a call of StartAlone.
func (c *Call[T]) Result() error {
	<-c.done
	return c.result()
}

// result returns the answer of the call. A panic of its batch goes on in the caller, as if the caller had run the
// statement.
func (c *Call[T]) result() error {
	if c.panicked != nil {
		panic(c.panicked)
	}
	return c.err
}
