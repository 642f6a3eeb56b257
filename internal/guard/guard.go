// Package guard is the common part of guards in front of handlers, for HTTP and for RPC: the names of results, and the
// meaning of the core's errors for a request.
package guard

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Results of a request, as [event.Answered] lists them.
const (
	Allowed      = "allowed"
	Refused      = "refused"
	BadKey       = "bad_key"
	BadCost      = "bad_cost"
	BadRequest   = "bad_request"
	TooCostly    = "too_costly"
	FailedClosed = "failed_closed"
	FailedOpen   = "failed_open"
	Cancelled    = "cancelled"
	Credited     = "credited"
	CreditFailed = "credit_failed"
	LeaseLost    = "lease_lost"
	Unlimited    = "unlimited"
)

// CheckLimiter returns an error unless limiter can decide outside of transactions.
func CheckLimiter(limiter *ratelimit.Limiter) error {
	switch {
	case limiter == nil:
		return errors.New("the limiter is nil; pass what ratelimit.New returned")
	case limiter.InTransaction():
		return errors.New("the limiter is bound to a transaction by WithTx; pass what ratelimit.New returned")
	}
	return nil
}

// Deciding returns the context for a decision on the request of ctx. It ends after timeout, or at an earlier deadline
// of ctx, and not when ctx is cancelled: net/http cancels the context of a client that has closed only its sending
// half, and that client still reads the response. A decision that ends early would also be unknown, because its tokens
// may be taken.
func Deciding(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	until := time.Now().Add(timeout)
	if deadline, bounded := ctx.Deadline(); bounded && deadline.Before(until) {
		until = deadline
	}
	return context.WithDeadline(context.WithoutCancel(ctx), until)
}

// Fault returns the result for an error of the core, and whether the request caused it.
func Fault(err error) (result string, ofRequest bool) {
	switch {
	case errors.Is(err, ratelimit.ErrInvalidKey):
		return BadKey, true
	case errors.Is(err, ratelimit.ErrInvalidCost):
		return BadCost, true
	case errors.Is(err, ratelimit.ErrCostExceedsCapacity):
		return TooCostly, true
	}
	return "", false
}

// Result returns the result of a request without a decision because of err. ctx is the request's own, without the time
// limit of the decision. A request is cancelled only if err says that ctx has ended. Even if open is true, Result
// allows no request if many requests caused the error, if the program ends, or if the call is invalid.
func Result(ctx context.Context, err error, open bool) string {
	result, ofRequest := Fault(err)
	switch {
	case ofRequest:
		return result
	case Ended(ctx) != nil && errors.Is(err, Ended(ctx)):
		return Cancelled
	case isProvoked(err), errors.Is(err, ratelimit.ErrClosed), IsMisuse(err), !open:
		return FailedClosed
	}
	return FailedOpen
}

// Ended returns why ctx has ended, or nil. The context of Deciding has the same deadline and may end a moment before
// ctx does.
func Ended(ctx context.Context) error {
	if deadline, bounded := ctx.Deadline(); ctx.Err() == nil && bounded && !time.Now().Before(deadline) {
		return context.DeadlineExceeded
	}
	return ctx.Err()
}

// IsEnforced reports whether at least one of the requests is for a limit in the mode On. Otherwise no failure turns a
// request away. A call without requests is a mistake, and is turned away.
func IsEnforced(limiter *ratelimit.Limiter, requests []ratelimit.Request) bool {
	return len(requests) == 0 || slices.ContainsFunc(requests,
		func(r ratelimit.Request) bool { return limiter.Mode(r) == ratelimit.On })
}

// IsMisuse reports whether err says that the program asked for what cannot be.
func IsMisuse(err error) bool {
	return errors.Is(err, ratelimit.ErrInvalidRequest) || errors.Is(err, ratelimit.ErrInvalidLimit) ||
		errors.Is(err, ratelimit.ErrInvalidConfig)
}

// isProvoked reports whether err is what clients can bring about at will, while the store works.
func isProvoked(err error) bool {
	return errors.Is(err, ratelimit.ErrContended) || errors.Is(err, ratelimit.ErrOverloaded)
}
