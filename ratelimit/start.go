package ratelimit

import (
	"context"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/reserved"
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
	return slotAfter(ctx, l, "start", id, (*reserved.Life).Start)
}

// slotAfter returns the slot of a reservation after change, which returns how long the work has to wait and whether it was started before.
func slotAfter(ctx context.Context, l *Limiter, verb, id string,
	change func(life *reserved.Life, ctx context.Context, r *reserved.Reservation) (wait time.Duration, restarted bool, err error),
) (slot Slot, err error) {
	err = withReservation(ctx, l, verb, id, func(ctx context.Context, life *reserved.Life, r *reserved.Reservation) error {
		wait, restarted, err := change(life, ctx, r)
		if err != nil {
			return err
		}
		slot = Slot{
			ID: r.ID, State: ReservationState(r.State), Wait: wait,
			ReadyAt: time.UnixMicro(r.ReadyUs), StaleAt: optionalTime(r.StaleUs), Restarted: restarted,
		}
		return life.Save(ctx, r)
	})
	return slot, err
}

// Started reports whether the work of a reservation has been started. The errors are those of Start.
func (l *Limiter) Started(ctx context.Context, id string) (bool, error) {
	started := false
	err := withReservation(ctx, l, "started", id, func(_ context.Context, _ *reserved.Life, r *reserved.Reservation) error {
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
	return slotAfter(ctx, l, "renew", id, func(life *reserved.Life, ctx context.Context, r *reserved.Reservation) (time.Duration, bool, error) {
		wait, err := life.Renew(ctx, r)
		return wait, false, err
	})
}
