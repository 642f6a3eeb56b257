package ratelimit

import (
	"context"

	"github.com/pgratelimit/pgratelimit/internal/batch"
	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// call is one call of Take, Check, Value or Reserve.
type call struct {
	batch.Call[call] // when it is outside a transaction

	verb    string
	plan    *plan
	reserve bool // whether a reservation is to be recorded
	look    bool // whether nothing is to be taken

	answers     []answer
	one         [1]answer // what answers is when there is one bucket
	reservation Reservation
	waits       int // how many rows it has waited for
	seq         int // its place in the batch, in the order of arrival
}

// blocked is a call that cannot be answered yet, because somebody holds a row that it needs.
type blocked = batch.Blocked[call]

// batched answers the calls of a Batcher on a Limiter.
type batched struct{ limiter *Limiter }

func newBatcher(l *Limiter) *batch.Batcher[call] {
	return batch.New[call](batched{l}, batch.Options{
		MaxWaiting: l.config.MaxWaiting, Timeout: l.config.Timeout, ErrClosed: ErrClosed, ErrOverloaded: ErrOverloaded,
	})
}

// Folds reports whether calls are folded: not on a single connection, which one caller at a time can use.
func (b batched) Folds() bool { return !b.limiter.config.NoBatching && b.limiter.connection() == nil }

func (b batched) DecideOne(ctx context.Context, c *call) error { return b.limiter.alone(ctx, c) }

func (b batched) RunAlone(ctx context.Context, c *call) ([]blocked, error) {
	return b.limiter.runAlone(ctx, c)
}

func (b batched) Run(ctx context.Context, calls []*call, waitFor *bucket.Key) []blocked {
	return b.limiter.runBatch(ctx, calls, waitFor)
}
