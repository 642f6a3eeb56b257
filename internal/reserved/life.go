package reserved

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// ErrEnded is returned when a reservation has ended in another way than the call asks for.
var ErrEnded = errors.New("ratelimit: the reservation has ended")

// EndedAs returns the error for a reservation that has ended in a state.
func EndedAs(state string) error { return fmt.Errorf("%w: it was %s", ErrEnded, state) }

// Owner is the Limiter that a Life belongs to.
type Owner interface {
	// Resolve sets the terms that the limits of a reservation have now, and the end of their pauses.
	Resolve(ctx context.Context, verb string, r *Reservation)
	// Changed is notified of buckets that are charged or taken from.
	Changed(asks []bucket.Ask)
	// Ended is notified of the amounts that the end of a reservation charges to its buckets.
	Ended(ctx context.Context, r *Reservation, amounts []float64)
}

// Life changes reservations in a transaction. A reservation is open, until it is settled, cancelled or expired. Renew opens it again.
type Life struct {
	Session     *store.Session
	Owner       Owner
	ExpireAfter time.Duration // after a reservation is ready, or was started
	StaleAfter  time.Duration // after a reservation is ready; 0: never
	ErrTooMuch  error         // wrapped by errors for costs that a limit can never give
}

// Lock locks a reservation to the end of the transaction.
func (l *Life) Lock(ctx context.Context, verb, id string) (*Reservation, error) {
	r, err := In(&l.Session.Unit).LockReservation(ctx, &l.Session.Unit, id, false)
	if err == nil {
		l.Owner.Resolve(ctx, verb, r)
	}
	return r, err
}

// LockOr is Lock of a reservation that may be gone. Then it returns lost under the ID, as a reservation that was
// cancelled now. The caller saves it.
func (l *Life) LockOr(ctx context.Context, verb, id string, lost *Reservation) (*Reservation, error) {
	r, err := In(&l.Session.Unit).LockReservation(ctx, &l.Session.Unit, id, true)
	if err != nil {
		return nil, err
	}
	if len(r.Buckets) == 0 {
		now, made := r.NowUs, *lost
		r, made.Buckets = &made, slices.Clone(lost.Buckets) // an attempt may be followed by another one
		r.ID, r.State, r.NowUs, r.ReadyUs, r.ExpiresUs = id, Cancelled, now, now, now+l.ExpireAfter.Microseconds()
		if l.StaleAfter > 0 {
			stale := now + l.StaleAfter.Microseconds()
			r.StaleUs = &stale
		}
	}
	l.Owner.Resolve(ctx, verb, r)
	return r, nil
}

// LockDue locks the due reservations that no other transaction has locked.
func (l *Life) LockDue(ctx context.Context, ids ...string) ([]*Reservation, error) {
	due, err := In(&l.Session.Unit).LockDue(ctx, &l.Session.Unit, ids)
	for _, r := range due {
		l.Owner.Resolve(ctx, "expire", r)
	}
	return due, err
}

// Save writes a reservation that was locked.
func (l *Life) Save(ctx context.Context, r *Reservation) error {
	return In(&l.Session.Unit).SaveReservation(ctx, &l.Session.Unit, r)
}

// End moves an open reservation to a final state, and charges the amounts to its buckets. It does not change a reservation that is
// already in that state.
func (l *Life) End(ctx context.Context, r *Reservation, final string, amounts func(*Reservation) ([]float64, error)) error {
	switch r.State {
	case final:
		_, err := amounts(r) // which checks what the call names
		return err
	case Open:
	default:
		return EndedAs(r.State)
	}
	due, err := amounts(r)
	if err != nil {
		return err
	}
	return l.finish(ctx, final, func(*Reservation) []float64 { return due }, r)
}

// Expire ends reservations that LockDue has locked.
func (l *Life) Expire(ctx context.Context, due ...*Reservation) error {
	return l.finish(ctx, Expired, (*Reservation).Released, due...)
}

// finish saves the final state of reservations, and then charges the buckets of all of them together, so that their rows are locked in order.
func (l *Life) finish(ctx context.Context, final string, amounts func(*Reservation) []float64, all ...*Reservation) error {
	var charges []store.Charge
	for _, r := range all {
		due := amounts(r)
		if slices.ContainsFunc(due, func(amount float64) bool { return amount != 0 }) {
			if StuckOf(ctx).Contains(r) {
				return ErrStuck
			}
			charges = append(charges, r.Charge(due))
		}
		r.State, r.ExpiresUs = final, max(r.ExpiresUs, r.NowUs)
		if final == Settled {
			r.settle(due)
		}
		if err := l.Save(ctx, r); err != nil {
			return err
		}
		l.Owner.Ended(ctx, r, due)
	}
	if len(charges) == 0 {
		return nil
	}
	for i := range charges {
		l.Owner.Changed(charges[i].Asks)
	}
	return l.Session.Charge(ctx, charges...)
}

// Start starts the work of a reservation if it may run, or returns how long that takes. restarted reports whether it
// was started before. again is whether a cancelled reservation is taken again. The caller saves the reservation.
func (l *Life) Start(ctx context.Context, r *Reservation, again bool) (wait time.Duration, restarted bool, err error) {
	switch {
	case r.State == Cancelled && !again:
		return 0, false, EndedAs(r.State)
	case r.PausedUntil > r.NowUs: // it keeps its slot, unless that is stale by then
		l.keep(r, r.PausedUntil)
		return r.until(r.PausedUntil), r.StartedUs != nil, nil
	case r.State == Cancelled, r.State == Expired && r.Release: // its tokens were returned, also if it was started
		wait, err = l.Renew(ctx, r)
	case r.StartedUs != nil: // it is alive: it must not be forgotten before its next attempt
		l.keep(r, r.NowUs)
		return 0, true, nil
	case r.State == Settled: // early; it keeps its slot
		return r.until(r.ReadyUs), false, nil
	case r.StaleUs != nil && r.NowUs >= *r.StaleUs:
		wait, err = l.Renew(ctx, r)
	default:
		wait = r.until(r.ReadyUs)
	}
	if err == nil && wait == 0 {
		now := r.NowUs
		r.StartedUs = &now
	}
	return wait, false, err
}

// keep keeps a reservation for ExpireAfter from an instant, at least.
func (l *Life) keep(r *Reservation, from int64) {
	r.ExpiresUs = max(r.ExpiresUs, from+l.ExpireAfter.Microseconds())
}

// until returns how long it takes until an instant.
func (r *Reservation) until(us int64) time.Duration {
	return time.Duration(max(0, us-r.NowUs)) * time.Microsecond
}

// Renew takes again what the reservation took, and moves it to its new slot. It returns the wait for that, or the wait until it can be tried again,
// without a change. The caller saves the reservation.
func (l *Life) Renew(ctx context.Context, r *Reservation) (wait time.Duration, err error) {
	asks := r.Asks()
	for i := range asks {
		a := &asks[i]
		if bucket.Holds(&a.Terms) { // by now; of slots nothing was reserved
			a.Cost, a.Lowest = 0, -math.MaxFloat64
		} else if !(a.Terms.Capacity-a.Cost >= a.Lowest) {
			return 0, fmt.Errorf("%w: the reservation cost %v of %q, which by now can never give more than %v at once",
				l.ErrTooMuch, a.Cost, a.Key.Name, a.Terms.Capacity-a.Lowest)
		}
	}
	c := store.Call{Question: store.Question{Verb: "renew", Asks: asks}}
	if err := l.Session.Decide(ctx, &c); err != nil {
		return 0, err
	}
	if !bucket.AllAllowed(c.Answers) {
		for i := range asks {
			wait = max(wait, asks[i].Tell(&c.Answers[i], asks[i].Lowest, &bucket.Content{}).RetryAfter)
		}
		return wait, nil
	}
	l.Owner.Changed(asks)
	r.reopen(ReadyAt(asks, c.Answers, r.PausedUntil))
	return time.Duration(r.ReadyUs-c.Answers[0].Now) * time.Microsecond, nil
}
