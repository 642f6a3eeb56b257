//go:build unix

package torture_test

import (
	"errors"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// errNothing says of an error that nothing was done, because the transaction did not come to its COMMIT.
var errNothing = errors.New("rolled back")

// errAny says of an error of COMMIT that all or nothing was done.
var errAny = errors.New("the commit is unknown")

// classify returns the outcome that an error promises, or unknown if it promises none.
func classify(err error) outcome {
	switch {
	case errors.Is(err, ratelimit.ErrCommitUnknown), errors.Is(err, errAny):
		return unknown
	case errors.Is(err, ratelimit.ErrLimited):
		return refused
	case errors.Is(err, errNothing):
		return failed
	}
	for _, nothing := range []error{
		ratelimit.ErrContended, ratelimit.ErrOverloaded, ratelimit.ErrClosed, ratelimit.ErrReservationEnded, ratelimit.ErrNotReserved,
		ratelimit.ErrLeaseLost, ratelimit.ErrInvalidRequest, ratelimit.ErrInvalidCost, ratelimit.ErrCostExceedsCapacity, ratelimit.ErrNoReservations,
	} {
		if errors.Is(err, nothing) {
			return failed
		}
	}
	var undone *pgconn.PgError
	if errors.As(err, &undone) && undone.SeverityUnlocalized == "ERROR" {
		return failed
	}
	var unreachable *pgconn.ConnectError // nothing was sent
	if errors.As(err, &unreachable) {
		return failed
	}
	return unknown
}
