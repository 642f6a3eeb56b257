package ratelimit

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
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
	var slot Slot
	err := withReservation(ctx, l, "start", id, func(ctx context.Context, tx *Limiter, r *store.Reservation) (err error) {
		if slot, err = start(ctx, tx, r); err != nil {
			return err
		}
		return tx.session.SaveReservation(ctx, r)
	})
	return slot, err
}

// start starts the work of a locked reservation if it may run, which is to be saved then.
func start(ctx context.Context, tx *Limiter, r *store.Reservation) (slot Slot, err error) {
	var wait time.Duration
	switch state := ReservationState(r.State); {
	case state == Cancelled:
		return slot, fmt.Errorf("%w: it was %s", ErrReservationEnded, state)
	case r.PausedUntil > r.NowUs: // it keeps its slot, unless that is stale by then
		r.ExpiresUs = max(r.ExpiresUs, r.PausedUntil+tx.config.ExpireAfter.Microseconds())
		return slotOf(r, time.Duration(r.PausedUntil-r.NowUs)*time.Microsecond, r.StartedUs != nil), nil
	case state == Expired && r.Release: // what it took is given back, whether it was started or not
		wait, err = renew(ctx, tx, r)
	case r.StartedUs != nil: // it is alive: it must not be forgotten before its next attempt
		r.ExpiresUs = max(r.ExpiresUs, r.NowUs+tx.config.ExpireAfter.Microseconds())
		return slotOf(r, 0, true), nil
	case state == Settled: // early; it keeps its slot
		return slotOf(r, untilReady(r), false), nil
	case r.StaleUs != nil && r.NowUs >= *r.StaleUs:
		wait, err = renew(ctx, tx, r)
	default:
		wait = untilReady(r)
	}
	if err != nil {
		return slot, err
	}
	if wait == 0 {
		r.StartedUs = &r.NowUs
	}
	return slotOf(r, wait, false), nil
}

// Started reports whether the work of a reservation has been started. The errors are those of Start.
func (l *Limiter) Started(ctx context.Context, id string) (bool, error) {
	started := false
	err := withReservation(ctx, l, "started", id, func(_ context.Context, _ *Limiter, r *store.Reservation) error {
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
	var slot Slot
	err := withReservation(ctx, l, "renew", id, func(ctx context.Context, tx *Limiter, r *store.Reservation) error {
		wait, err := renew(ctx, tx, r)
		if err != nil {
			return err
		}
		slot = slotOf(r, wait, false)
		return tx.session.SaveReservation(ctx, r)
	})
	return slot, err
}

// renew takes again what r took, moves it to the new slot and returns the wait for that; or leaves it and
// returns the wait until that can be tried again.
func renew(ctx context.Context, tx *Limiter, r *store.Reservation) (time.Duration, error) {
	asks := r.Asks()
	for i := range asks {
		if bucket.Holds(&asks[i].Terms) { // by now; of slots nothing was reserved
			asks[i].Cost, asks[i].Lowest = 0, -math.MaxFloat64
			continue
		}
		if a := &asks[i]; !(a.Terms.Capacity-a.Cost >= a.Lowest) {
			return 0, fmt.Errorf("%w: the reservation cost %v of %q, which by now can never give more than %v at once",
				ErrCostExceedsCapacity, a.Cost, a.Key.Name, a.Terms.Capacity-a.Lowest)
		}
	}
	c := store.Call{Question: store.Question{Verb: "renew", Asks: asks}}
	if err := tx.session.Decide(ctx, &c); err != nil {
		return 0, err
	}
	answers := c.Answers
	if !bucket.AllAllowed(answers) {
		var wait time.Duration
		for i := range asks {
			wait = max(wait, stateOf(Limit{}, &asks[i], &answers[i], &bucket.Content{}).RetryAfter)
		}
		return wait, nil
	}
	tx.reports.invalidate(asks)
	r.Reopen(store.ReadyAt(asks, answers, r.PausedUntil))
	return time.Duration(r.ReadyUs-answers[0].Now) * time.Microsecond, nil
}

// untilReady returns how long it takes until the work may run.
func untilReady(r *store.Reservation) time.Duration {
	return time.Duration(max(0, r.ReadyUs-r.NowUs)) * time.Microsecond
}

// slotOf returns r as the caller sees it.
func slotOf(r *store.Reservation, wait time.Duration, restarted bool) Slot {
	return Slot{
		ID: r.ID, State: ReservationState(r.State), Wait: wait,
		ReadyAt: time.UnixMicro(r.ReadyUs), StaleAt: optionalTime(r.StaleUs), Restarted: restarted,
	}
}
