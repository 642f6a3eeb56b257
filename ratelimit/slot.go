package ratelimit

import (
	"context"
	"fmt"
	"time"
)

// Slot is when the work of a reservation may run.
type Slot struct {
	// ID is the reservation's.
	ID string
	// State is the reservation's state after the call.
	State ReservationState
	// Wait is how long the work still has to wait: 0 when it may run now.
	Wait time.Duration
	// ReadyAt and StaleAt are those of the Reservation, or later ones when the slot was lost.
	ReadyAt, StaleAt time.Time
	// Restarted is whether the work was started before, so that this is another attempt at it.
	Restarted bool
}

// Start asks whether the work of a reservation may run now, at the moment it is about to. When Wait is
// above 0 it may not yet: come back after that long. Work that comes up after StaleAt without having been
// started, because its workers were down, has lost its slot, as the tokens meant for it ran over while
// nothing ran: Start then reserves again what it cost and answers with the new slot, so that work that
// piled up in an outage does not burst. Work that was started may start again, as often as it is tried,
// without paying again, unless its reservation expired and gave back what it took. Whoever pays again does so as
// [Limiter.Renew] says.
//
// It returns ErrReservationEnded when the reservation was cancelled, ErrNotReserved when there is none, and
// ErrCostExceedsCapacity as Renew does; do not run the work then.
func (l *Limiter) Start(ctx context.Context, id string) (Slot, error) {
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	var slot Slot
	err := l.withReservation(ctx, "start", id, func(tx *Limiter, r *reservation) error {
		var wait time.Duration
		var err error
		switch {
		case r.State == Cancelled:
			return fmt.Errorf("%w: it was %s", ErrReservationEnded, r.State)
		case r.State == Expired && r.Release: // what it took is given back, whether it was started or not
			wait, err = tx.renew(ctx, r)
		case r.StartedUs != nil: // it is alive: it must not be forgotten before its next attempt
			r.ExpiresUs = max(r.ExpiresUs, r.NowUs+l.config.ExpireAfter.Microseconds())
			slot = r.slot(0, true)
			return tx.save(ctx, r)
		case r.State == Settled: // early; it keeps its slot
			slot = r.slot(r.untilReady(), false)
			return nil
		case r.StaleUs != nil && r.NowUs >= *r.StaleUs:
			wait, err = tx.renew(ctx, r)
		default:
			wait = r.untilReady()
		}
		if err != nil {
			return err
		}
		if wait == 0 {
			r.StartedUs = &r.NowUs
		}
		slot = r.slot(wait, false)
		return tx.save(ctx, r)
	})
	return slot, err
}

// Started reports whether the work of a reservation has been started. The errors are those of Start.
func (l *Limiter) Started(ctx context.Context, id string) (bool, error) {
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	started := false
	err := l.withReservation(ctx, "started", id, func(_ *Limiter, r *reservation) error {
		started = r.StartedUs != nil
		return nil
	})
	return started, err
}

// Renew reserves again what the reservation cost, for work that has to pay for another attempt or that
// is to run although it was cancelled, and answers with the new slot. Whatever it was before, it counts as not
// started and as open then. When more is owed than MaxReserved allows, nothing changes and Wait is how long
// until Renew could succeed. It returns ErrNotReserved when there is no such reservation.
//
// It takes under the policy that the limit has now, as far as it can tell: the one that this Limiter last used the
// name with, for whichever key, and where it was not used with it the one the reservation was made under. It
// returns ErrCostExceedsCapacity when by that the limit can never give so much. Where keys have plans of their own
// under one name, that may be another key's plan: Settle and Reserve again there, or give each plan a name.
func (l *Limiter) Renew(ctx context.Context, id string) (Slot, error) {
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	var slot Slot
	err := l.withReservation(ctx, "renew", id, func(tx *Limiter, r *reservation) error {
		wait, err := tx.renew(ctx, r)
		if err != nil {
			return err
		}
		slot = r.slot(wait, false)
		return tx.save(ctx, r)
	})
	return slot, err
}

// renew takes again what r took, moves it to the new slot and returns the wait for that; or leaves it and
// returns the wait until that can be tried again.
func (l *Limiter) renew(ctx context.Context, r *reservation) (time.Duration, error) {
	p := r.plan()
	for i := range p.buckets {
		if b := &p.buckets[i]; !(b.terms.Capacity-b.cost >= b.lowest) {
			return 0, fmt.Errorf("%w: the reservation cost %v of %q, which by now can never give more than %v at once",
				ErrCostExceedsCapacity, b.cost, b.limit.name, b.terms.Capacity-b.lowest)
		}
	}
	answers, err := l.run(ctx, p)
	if err != nil {
		return 0, err
	}
	d := p.decide(answers)
	if !d.Allowed {
		return d.RetryAfter, nil
	}
	l.invalidate(p)
	wait := p.readyAfter(answers)
	ready := d.At.Add(wait)
	if r.StaleUs != nil {
		stale := ready.UnixMicro() + (*r.StaleUs - r.ReadyUs)
		r.StaleUs = &stale
	}
	r.ExpiresUs += ready.UnixMicro() - r.ReadyUs
	r.State, r.ReadyUs, r.StartedUs = Open, ready.UnixMicro(), nil
	r.remake()
	return wait, nil
}

// slot returns r as the caller sees it.
func (r *reservation) slot(wait time.Duration, restarted bool) Slot {
	s := Slot{ID: r.ID, State: r.State, Wait: wait, ReadyAt: r.readyAt(), Restarted: restarted}
	if r.StaleUs != nil {
		s.StaleAt = time.UnixMicro(*r.StaleUs)
	}
	return s
}
