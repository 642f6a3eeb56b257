package scheduler

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Turn is the reservation of the job that is being worked.
type Turn struct {
	// Turn has the reservation's ID and times, and whether this is another attempt.
	ratelimit.Turn

	limiter *ratelimit.Limiter
}

type turnKey struct{}

// TurnFromContext returns the turn of the job that ctx, the context of Work, belongs to. It is never nil:
// where there is none, its methods return ErrNoTurn.
func TurnFromContext(ctx context.Context) *Turn {
	if turn, ok := ctx.Value(turnKey{}).(*Turn); ok {
		return turn
	}
	return &Turn{}
}

// WithTx returns the turn as part of tx, so that what the job really cost commits with what it did, and with
// River's JobCompleteTx.
func (s *Turn) WithTx(tx pgx.Tx) *Turn {
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
func (s *Turn) Settle(ctx context.Context, actual ...ratelimit.Request) error {
	if s.limiter == nil {
		return fmt.Errorf("%w: Settle in a job that Enqueue did not insert, or on a client without the middleware", ErrNoTurn)
	}
	return s.limiter.Settle(ctx, s.ID, actual...)
}

// Cancel gives back all that was reserved, for a job that finds it has nothing to do.
func (s *Turn) Cancel(ctx context.Context) error {
	if s.limiter == nil {
		return fmt.Errorf("%w: Cancel in a job that Enqueue did not insert, or on a client without the middleware", ErrNoTurn)
	}
	return s.limiter.Cancel(ctx, s.ID)
}
