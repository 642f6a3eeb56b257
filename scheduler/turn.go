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

// TurnFromContext returns the turn of the job with the context ctx of Work. It is never nil: without a turn, its
// methods return ErrNoTurn.
func TurnFromContext(ctx context.Context) *Turn {
	if turn, ok := ctx.Value(turnKey{}).(*Turn); ok {
		return turn
	}
	return &Turn{}
}

// WithTx returns the turn as part of tx, so that the actual cost commits with the job's writes, and with River's
// JobCompleteTx.
func (s *Turn) WithTx(tx pgx.Tx) *Turn {
	if s.limiter == nil {
		return s
	}
	bound := *s
	bound.limiter = s.limiter.WithTx(tx)
	return &bound
}

// Settle ends the reservation with the actual cost, as [ratelimit.Limiter.Settle] does: pass a request for each limit
// whose cost differs from the estimate. A job that succeeds without it keeps its estimate. Settling again changes
// nothing, so a job that may be retried settles last.
func (s *Turn) Settle(ctx context.Context, actual ...ratelimit.Request) error {
	if s.limiter == nil {
		return noTurn("Settle")
	}
	return s.limiter.Settle(ctx, s.ID, actual...)
}

// Cancel returns all reserved tokens, for a job that has nothing to do.
func (s *Turn) Cancel(ctx context.Context) error {
	if s.limiter == nil {
		return noTurn("Cancel")
	}
	return s.limiter.Cancel(ctx, s.ID)
}

func noTurn(method string) error {
	return fmt.Errorf("%w: %s in a job that Enqueue did not insert, or on a client without the middleware", ErrNoTurn,
		method)
}
