package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
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
	return held, keep(ctx, inBackground(l), lease, lose)
}

// keep is Keep of a lease that has to be lost with lose.
func keep(ctx context.Context, l leases, lease Lease, lose context.CancelCauseFunc) (release func()) {
	k := &keeper{limiter: l, id: lease.ID, lose: lose, stop: make(chan struct{}), done: make(chan struct{})}
	k.holds(lease)
	background := context.WithoutCancel(ctx)
	release = sync.OnceFunc(func() { k.release(background) })
	if !time.Now().Before(k.end) {
		if err := k.renew(ctx); err != nil {
			if !k.gone {
				err = fmt.Errorf("%w: it could not be renewed: %w", ErrLeaseLost, err)
			}
			lose(err)
			close(k.done)
			return release
		}
	}
	k.expiry = time.AfterFunc(time.Until(k.end), func() { lose(errNotRenewed) })
	go k.run(background)
	return release
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

// leases is what a keeper needs of a Limiter.
type leases interface {
	RenewLease(ctx context.Context, id string) (Lease, error)
	Release(ctx context.Context, id string) error
}

// keeper renews one lease.
type keeper struct {
	limiter leases
	id      string // of the lease
	lose    context.CancelCauseFunc
	expiry  *time.Timer   // loses the lease at end; nil where it was lost from the beginning
	stop    chan struct{} // is closed when the work is done
	done    chan struct{} // is closed when no renewal is under way any more

	// Of run, once that is running.
	length time.Duration // of the lease
	end    time.Time     // until when it holds, whatever the server's clock shows
	gone   bool          // the server said that it is lost
}

// holds notes what the server said of the lease. It had decided when its answer came, and not before it was asked.
func (k *keeper) holds(lease Lease) {
	k.length = lease.Until.Sub(lease.At)
	k.end = lease.asked.Add(k.length)
}

// renew renews the lease. A panic of a hook of the program, such as a tracer of pgx, is an error: it must not end the process.
func (k *keeper) renew(ctx context.Context) (err error) {
	defer func() {
		if failure := recover(); failure != nil {
			err = fmt.Errorf("a hook panicked: %v", failure)
		}
	}()
	lease, err := k.limiter.RenewLease(ctx, k.id)
	if err != nil {
		k.gone = errors.Is(err, ErrLeaseLost)
		return err
	}
	k.holds(lease)
	return nil
}

// run renews the lease each time a third of it is over, until the work is done or the lease is lost.
func (k *keeper) run(ctx context.Context) {
	defer close(k.done)
	for next := k.end.Add(-k.length * 2 / 3); ; {
		if !k.wait(time.Until(next)) || !time.Now().Before(k.end) {
			return
		}
		bounded, cancel := context.WithDeadline(ctx, k.end)
		err := k.renew(bounded)
		cancel()
		switch {
		case err == nil:
			if !k.expiry.Reset(time.Until(k.end)) { // it has been lost meanwhile
				k.expiry.Stop()
				return
			}
			next = k.end.Add(-k.length * 2 / 3)
		case k.gone:
			k.lose(err)
			return
		default:
			next = time.Now().Add(k.length / 12)
		}
	}
}

// wait waits for a span and reports whether the work still goes on.
func (k *keeper) wait(span time.Duration) bool {
	timer := time.NewTimer(span)
	defer timer.Stop()
	select {
	case <-k.stop:
		return false
	case <-timer.C:
	}
	select {
	case <-k.stop:
		return false
	default:
		return true
	}
}

// release ends the renewals, waits for one that is under way, since giving it up would cost its connection, and releases the
// lease. One that ended by the clock of this process may go on at the server, whose answer was lost, and is released, too.
func (k *keeper) release(ctx context.Context) {
	defer k.lose(nil)
	close(k.stop)
	<-k.done
	if k.expiry != nil {
		k.expiry.Stop()
	}
	if !k.gone {
		bounded, cancel := context.WithTimeout(ctx, max(k.length, defaultTimeout)) // then the slots are free by themselves
		defer cancel()
		if err := k.limiter.Release(bounded, k.id); errors.Is(err, ErrLeaseLost) {
			k.lose(err)
		} // the Observer has been told of any other
	}
}
