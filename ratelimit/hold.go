package ratelimit

import (
	"context"
	"errors"
	"fmt"

	"github.com/pgratelimit/pgratelimit/internal/slots"
)

// Hold acquires what the requests ask, calls fn while it holds that, and releases it when fn has returned or panicked.
// It is Acquire, Keep and Release in one call:
//
//	err := limiter.Hold(ctx, func(ctx context.Context, lease ratelimit.Lease) error {
//		return export(ctx, customer, lease.Fence)
//	}, Exports.For(customer))
//
// Where it is refused, fn is not called, and the error is a *[LimitedError] with the decision. fn has to stop when its
// context ends: by then the lease may be lost, as [Limiter.Keep] says, and somebody else may have the slot. Hold returns
// ErrLeaseLost then, and where the release finds the lease lost, with the error of fn behind it, also where fn returned nil. Otherwise it returns what fn does,
// or the errors of [Limiter.Acquire]. A lease that could not be released is no error: the Observer is told, and the slot
// comes back when the lease ends.
//
// When Hold returns, nothing of it is running any more. On a Limiter of WithTx it returns ErrInvalidConfig, because a
// transaction takes the slot only when it commits: call Acquire there, and Keep once it has committed.
func (l *Limiter) Hold(ctx context.Context, fn func(ctx context.Context, lease Lease) error, requests ...Request) error {
	if l.InTransaction() {
		return fmt.Errorf("%w: hold: %w", ErrInvalidConfig, errHoldInTx)
	}
	lease, err := l.Acquire(ctx, requests...)
	if err != nil {
		return err
	}
	if !lease.Allowed {
		return lease.Err()
	}
	held, release := l.Keep(ctx, lease)
	defer release()
	err = fn(held, lease)
	release()
	switch lost := context.Cause(held); {
	case !errors.Is(lost, ErrLeaseLost) || errors.Is(err, ErrLeaseLost):
		return err
	case err == nil:
		return fmt.Errorf("ratelimit: hold: %w", lost)
	default:
		return fmt.Errorf("ratelimit: hold: %w: %w", lost, err)
	}
}

var errHoldInTx = errors.New("the Limiter is bound to a transaction by WithTx, which cannot hold what it has not committed; " +
	"call Acquire in the transaction, and Keep on the Limiter that New returned once it has committed")

// Keep renews a lease in the background until release is called, which releases it and waits for that. It is for
// work that is not one function, or whose lease was acquired in a transaction that has committed:
//
//	held, release := limiter.Keep(ctx, lease)
//	defer release()
//
// held is ctx, but that it ends when the lease is lost, with the cause ErrLeaseLost: when the lease has ended or was
// released by somebody else, and when it could not be renewed by the time that it ends. [LeaseFromContext] finds the lease
// in it. It ends with release, too.
//
// The lease is renewed each time a third of it is over, and a renewal that fails is tried again each twelfth. That is counted
// on this process's own clock, from before the call that acquired or renewed the lease: the database's clock need not agree.
// The renewals go on when ctx ends, for as long as the work takes to stop. A lease whose time may be over already, such as one
// that another process has passed on (Lease{ID: id}), is renewed before Keep returns.
//
// What Keep cannot see is a process that stands still, as in a machine that is suspended: it works on for a moment when it
// wakes up, beside whoever got its slot. What must not be done twice has to compare [Lease.Fence].
//
// When release finds that the lease had been lost, [context.Cause] of held says so from then on. Calling it again does
// nothing. On a Limiter of WithTx held has ended with ErrInvalidConfig as its cause.
func (l *Limiter) Keep(ctx context.Context, lease Lease) (held context.Context, release func()) {
	if lease.ID != "" {
		ctx = context.WithValue(ctx, leaseKey{}, lease)
	}
	held, lose := context.WithCancelCause(ctx)
	forget := func() { lose(nil) }
	if l.InTransaction() {
		lose(fmt.Errorf("%w: keep: %w", ErrInvalidConfig, errHoldInTx))
		return held, forget
	}
	if lease.ID == "" { // it holds nothing
		return held, forget
	}
	return held, slots.Keep(ctx, keepingLease{inBackground(l)}, lease.ID, lease.span(), lose)
}

// span returns how long the lease holds, on the clock of this process: from before it was asked for.
func (l *Lease) span() slots.Span { return slots.Span{Asked: l.asked, Length: l.Until.Sub(l.At)} }

// keepingLease is a Limiter as package slots knows it.
type keepingLease struct{ *Limiter }

// Renew renews a lease.
func (l keepingLease) Renew(ctx context.Context, id string) (slots.Span, error) {
	lease, err := l.RenewLease(ctx, id)
	return lease.span(), err
}

// IsLost reports whether an error says that a lease is lost.
func (l keepingLease) IsLost(err error) bool { return errors.Is(err, ErrLeaseLost) }

// Lost returns the error of a lease that could not be renewed in time.
func (l keepingLease) Lost(cause error) error {
	if cause == nil {
		return errNotRenewed
	}
	return fmt.Errorf("%w: it could not be renewed: %w", ErrLeaseLost, cause)
}

// errNotRenewed is the cause of a context whose lease has ended by the clock of this process.
var errNotRenewed = fmt.Errorf("%w: it was not renewed by the time that it ended", ErrLeaseLost)

type leaseKey struct{}

// LeaseFromContext returns the lease that the work of ctx is done under, the innermost of [Limiter.Keep] and
// [Limiter.Hold], and of the guards in front of handlers and jobs that hold slots. Its Until is of when it was acquired.
func LeaseFromContext(ctx context.Context) (Lease, bool) {
	lease, ok := ctx.Value(leaseKey{}).(Lease)
	return lease, ok
}
