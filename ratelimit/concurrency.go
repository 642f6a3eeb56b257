package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/arg"
	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/slots"
	"github.com/pgratelimit/pgratelimit/internal/words"
)

// Concurrency limits how many slots are held at the same time. [Limiter.Acquire] takes a lease on slots, and
// [Limiter.Release] returns them. If a holder dies, its slots are free when the lease ends. [Limiter.Hold] renews and
// releases for you.
//
// A holder that works on after its lease has ended does so beside other holders; [Lease] says how to prevent that. In
// answers, tokens are free slots, which are negative while more are held than Slots allows, because Slots was lowered.
//
// Check reports whether Acquire would be allowed, and Value returns the free slots. Reset frees all slots, and their
// holders get ErrLeaseLost. Take, Reserve, Credit and Charge return ErrInvalidRequest, because they give no lease.
//
// If you change Slots or Lease, held leases stay as they are. Don't change a limit's kind to or from Concurrency: give
// it another name instead. At first no slot is held, and while programs disagree about the kind, held slots can seem
// free and taken tokens can be available again.
//
// Leases end by the database's clock. If it steps back, they end that much later. If it jumps ahead, they end early,
// and a lease that it gave meanwhile ends within a lease's length once the clock is right again.
type Concurrency struct {
	// Slots is the number of slots: from 1 to 1000.
	Slots int
	// Lease is how long a slot is held without RenewLease: whole microseconds, from 1ms to 24h. Defaults to a minute.
	Lease time.Duration
}

// maxSlots is the maximum number of slots, because a refusal reads the leases on them.
const maxSlots = slots.MaxSlots

// String returns the policy as text, such as "5 at a time, leases of 1m".
func (p Concurrency) String() string {
	return fmt.Sprintf("%d at a time, leases of %s", p.Slots, words.Span(p.lease()))
}

func (p Concurrency) lease() time.Duration {
	if p.Lease == 0 {
		return time.Minute
	}
	return p.Lease
}

func (p Concurrency) compile() (bucket.Terms, error) {
	lease := p.lease()
	switch {
	case p.Slots < 1 || p.Slots > maxSlots:
		return bucket.Terms{}, fmt.Errorf("its Slots is %d; it must be from 1 to %d slots", p.Slots, maxSlots)
	case lease < time.Millisecond || lease > Day || lease%time.Microsecond != 0:
		return bucket.Terms{}, fmt.Errorf("its Lease is %v; it must be whole microseconds, from 1ms to 24h (write "+
			"30*time.Second, not 30)", p.Lease)
	}
	return bucket.Terms{
		Capacity: float64(p.Slots), Rate: float64(p.Slots), Step: 1, Steps: float64(lease.Microseconds()),
		Phase: bucket.MinInstant,
		Kind:  bucket.Concurrent{Lease: lease.Microseconds()},
	}, nil
}

// holds reports whether the limit gives slots in place of tokens.
func (l Limit) holds() bool {
	t := l.terms()
	return bucket.Holds(&t)
}

const verbAcquire = "acquire"

// checkVerb returns an error if the limit does not support the verb, or not with this cost.
func checkVerb(limit Limit, verb string, cost float64) error {
	if !limit.holds() {
		return nil
	}
	switch verb {
	case verbAcquire, verbCheck:
		if cost == 0 && verb == verbAcquire {
			return fmt.Errorf("%w: 0 of %q; ask for one slot or more", ErrInvalidCost, limit.Name())
		}
		return checkSlots(limit, cost)
	case "value", "reset":
		return nil
	}
	return fmt.Errorf("%w: %s of %q, which is %v: call Acquire, which takes a lease on slots, and Release",
		ErrInvalidRequest, verb, limit.Name(), limit.Policy())
}

// checkSlots returns an error if the limit has a Concurrency policy and cost is not a whole number of slots.
func checkSlots(limit Limit, cost float64) error {
	if limit.holds() && cost != math.Trunc(cost) {
		return fmt.Errorf("%w: %v of %q; slots are whole: ask for one or more of them", ErrInvalidCost, cost, limit.Name())
	}
	return nil
}

type slotsText struct {
	Kind  Kind `json:"kind"`
	Slots int  `json:"slots"`
	Lease span `json:"lease,omitempty"`
}

func (p Concurrency) text() policyText {
	return &slotsText{KindConcurrency, p.Slots, span(without(p.Lease, time.Minute))}
}

func (t *slotsText) policy() (Policy, error) {
	return Concurrency{Slots: t.Slots, Lease: time.Duration(t.Lease)}, nil
}

func (p Concurrency) scaled(times float64) Policy {
	p.Slots = int(min(max(math.Floor(float64(p.Slots)*times), 1), maxSlots))
	return p
}

// Hold acquires the slots and tokens of the requests, calls fn, and releases the slots when fn has returned or
// panicked. It combines Acquire, KeepAlive and Release:
//
//	err := limiter.Hold(ctx, func(ctx context.Context, lease ratelimit.Lease) error {
//		return export(ctx, customer, lease.Fence)
//	}, Exports.For(customer))
//
// If the requests are refused, Hold returns a *[LimitedError] and doesn't call fn. fn must stop when its context ends,
// because the lease may then be lost and its slot taken; see [Limiter.KeepAlive]. If the lease was lost while fn ran,
// Hold returns ErrLeaseLost, which wraps fn's error, even if fn returned nil. Otherwise it returns fn's error, or
// Acquire's. A failed release goes only to the Observer, and the slot is then free when the lease ends.
//
// When Hold returns, nothing of it is running. It can't be part of a transaction, because a slot is held only after the
// commit: call Acquire in the transaction, and KeepAlive after it.
func (l *Limiter) Hold(ctx context.Context, fn func(ctx context.Context, lease Lease) error,
	requests ...Request,
) error {
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
	held, release := l.KeepAlive(ctx, lease)
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

var errHoldInTx = errors.New("the Limiter is bound to a transaction by WithTx, which cannot hold what it has not " +
	"committed; " +
	"call Acquire in the transaction, and Keep on the Limiter that New returned once it has committed")

// KeepAlive renews a lease in the background until you call release, which ends the renewals, releases the lease, and
// waits for both. Use it for work that isn't one function, or for a lease that was acquired in a committed transaction:
//
//	held, release := limiter.KeepAlive(ctx, lease)
//	defer release()
//
// held is derived from ctx, and carries the lease for [LeaseFromContext]. It ends with release, and with the cause
// ErrLeaseLost if the lease has ended, was released, or couldn't be renewed in time. If release finds the lease lost,
// [context.Cause] of held returns ErrLeaseLost from then on. Calling release again does nothing. On a Limiter of
// WithTx, held has already ended with the cause ErrInvalidConfig.
//
// KeepAlive renews the lease when a third of it has passed, and retries a failed renewal after each twelfth, even after
// ctx has ended, until you call release. It measures on this process's clock, from before the call that acquired or
// renewed the lease, so the database's clock can differ. If a lease may have ended already, such as another process's
// Lease{ID: id}, it's renewed before KeepAlive returns.
//
// A process that was suspended can't notice in time: when it continues, the work runs on for a moment beside the slot's
// new holder. If this must not happen, compare [Lease.Fence].
func (l *Limiter) KeepAlive(ctx context.Context, lease Lease) (held context.Context, release func()) {
	if err := arg.CheckContext(ctx, "keep"); err != nil {
		held, lose := context.WithCancelCause(context.Background())
		lose(fmt.Errorf("%w: %w", ErrInvalidRequest, err))
		return held, func() {}
	}
	if lease.ID != "" {
		ctx = context.WithValue(ctx, leaseKey{}, lease)
	}
	held, lose := context.WithCancelCause(ctx)
	forget := func() { lose(nil) }
	if l.InTransaction() {
		lose(fmt.Errorf("%w: keep: %w", ErrInvalidConfig, errHoldInTx))
		return held, forget
	}
	if lease.ID == "" { // the lease holds no slots
		return held, forget
	}
	return held, slots.Keep(ctx, keepingLease{inBackground(l)}, lease.ID, lease.span(), lose)
}

// span returns the time span of the lease on this process's clock, from before the call that acquired it.
func (l *Lease) span() slots.Span { return slots.Span{Asked: l.asked, Length: l.Until.Sub(l.At)} }

// keepingLease adapts a Limiter to package slots.
type keepingLease struct{ *Limiter }

// Renew renews the lease id.
func (l keepingLease) Renew(ctx context.Context, id string) (slots.Span, error) {
	lease, err := l.RenewLease(ctx, id)
	return lease.span(), err
}

// IsLost reports whether err says that a lease is lost.
func (l keepingLease) IsLost(err error) bool { return errors.Is(err, ErrLeaseLost) }

// Lost returns the error for a lease that could not be renewed in time.
func (l keepingLease) Lost(cause error) error {
	if cause == nil {
		return errNotRenewed
	}
	return fmt.Errorf("%w: it could not be renewed: %w", ErrLeaseLost, cause)
}

// errNotRenewed is the cause of a context whose lease has ended on this process's clock.
var errNotRenewed = fmt.Errorf("%w: it was not renewed by the time that it ended", ErrLeaseLost)

type leaseKey struct{}

// LeaseFromContext returns the innermost lease that ctx's work holds through [Limiter.KeepAlive], [Limiter.Hold], or a
// guard of handlers or jobs. Its Until is the end before any renewal.
func LeaseFromContext(ctx context.Context) (Lease, bool) {
	lease, ok := ctx.Value(leaseKey{}).(Lease)
	return lease, ok
}
