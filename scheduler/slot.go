package scheduler

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Slot is the reservation of the job that is being worked.
type Slot struct {
	// Slot has the reservation's ID and times, and whether this is another attempt.
	ratelimit.Slot

	limiter *ratelimit.Limiter
}

type slotKey struct{}

// SlotFromContext returns the slot of the job that ctx, the context of Work, belongs to. It is never nil:
// where there is none, its methods return ErrNoSlot.
func SlotFromContext(ctx context.Context) *Slot {
	if slot, ok := ctx.Value(slotKey{}).(*Slot); ok {
		return slot
	}
	return &Slot{}
}

// WithTx returns the slot as part of tx, so that what the job really cost commits with what it did, and with
// River's JobCompleteTx.
func (s *Slot) WithTx(tx pgx.Tx) *Slot {
	if s.limiter == nil {
		return s
	}
	bound := *s
	bound.limiter = s.limiter.WithTx(tx)
	return &bound
}

// Settle ends the reservation with what the work really cost, as [ratelimit.Limiter.Settle] does: a request
// for each limit whose cost differs from the estimate. A job that succeeds without it keeps its estimate.
// Settling again changes nothing, so a job that may be tried again settles last.
func (s *Slot) Settle(ctx context.Context, actual ...ratelimit.Request) error {
	if s.limiter == nil {
		return fmt.Errorf("%w: Settle in a job that Enqueue did not insert, or on a client without the middleware", ErrNoSlot)
	}
	return s.limiter.Settle(ctx, s.ID, actual...)
}

// Cancel gives back all that was reserved, for a job that finds it has nothing to do.
func (s *Slot) Cancel(ctx context.Context) error {
	if s.limiter == nil {
		return fmt.Errorf("%w: Cancel in a job that Enqueue did not insert, or on a client without the middleware", ErrNoSlot)
	}
	return s.limiter.Cancel(ctx, s.ID)
}
