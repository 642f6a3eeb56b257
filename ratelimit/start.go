package ratelimit

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/reserved"
)

// Turn says when the work of a reservation may run.
type Turn struct {
	// ID is the ID of the reservation.
	ID string
	// State is the state of the reservation after the call.
	State ReservationState
	// Wait is the time until the work may run. 0 means now.
	Wait time.Duration
	// ReadyAt and StaleAt are the times of the Reservation, or later ones if the turn was lost.
	ReadyAt, StaleAt time.Time
	// Restarted reports whether the work was started before, so that this is another attempt.
	Restarted bool
}

// Start reports whether the work of a reservation may run now. Call it right before the work. If Wait is above 0, call
// Start again after that time.
//
// Work that was not started by StaleAt, for example because its workers were down, has lost its turn. Its tokens
// arrived while nothing ran, and the full bucket could not keep them. Start then reserves the cost again and returns
// the new turn, so that delayed work does not cause a burst. Work that was started can be started again, any number of
// times, without paying again. The exception is a reservation that expired and was credited. If Start reserves again,
// it does so as [Limiter.Renew] does.
//
// again are the requests that the reservation was made with, for work that must run although its reservation was
// cancelled, or is gone: its row was deleted a week after the reservation had ended, or lost with the table. Start then
// reserves the requests under the same ID, once, however many callers there are, and returns the new turn. If a limit
// with a MaxReserved refuses, nothing is taken, and Wait is the time until Start can succeed. With
// [Limiter.MarshalRequests] the work can carry its requests.
//
// Without again, Start returns ErrReservationEnded if the reservation was cancelled, and ErrNotReserved if it does not
// exist. It returns ErrCostExceedsCapacity as Renew does. Do not run the work then.
func (l *Limiter) Start(ctx context.Context, id string, again ...Request) (Turn, error) {
	start := func(life *reserved.Life, ctx context.Context, r *reserved.Reservation) (time.Duration, bool, error) {
		return life.Start(ctx, r, len(again) > 0)
	}
	if len(again) == 0 {
		return turnAfter(ctx, l, "start", id, start)
	}
	if err := l.readyFor(ctx, "start", id); err != nil {
		return Turn{}, err
	}
	lost, err := recordOf(ctx, l, again)
	if err != nil {
		return Turn{}, during("start", err)
	}
	lock := func(ctx context.Context, life *reserved.Life) (*reserved.Reservation, error) {
		return life.LockOr(ctx, "start", id, lost)
	}
	var turn Turn
	keyed := slices.ContainsFunc(again, func(r Request) bool { return !r.stored })
	err = lockedBy(ctx, l, "start", id, keyed, lock, turning(&turn, start))
	return turn, err
}

// recordOf returns the reservation of requests, without an ID and an instant.
func recordOf(ctx context.Context, l *Limiter, requests []Request) (*reserved.Reservation, error) {
	if len(requests) > maxRequests {
		return nil, fmt.Errorf("%w: the call asks for %d limits; it takes from 1 to %d", ErrInvalidRequest, len(requests),
			maxRequests)
	}
	costs, err := actualCosts(ctx, l, "start", requests)
	if err != nil {
		return nil, err
	}
	r := &reserved.Reservation{Release: l.config.ReleaseExpired}
	for _, key := range slices.SortedFunc(maps.Keys(costs), bucket.Key.Compare) {
		c := costs[key]
		n := c.subject.shards
		for row := range n {
			key.Shard = shardOf(n, row)
			r.Buckets = append(r.Buckets, reserved.NewReserved(key, c.subject.plan, c.cost/float64(n), &c.terms))
		}
	}
	return r, nil
}

// turnAfter returns the turn of a reservation after change. change returns the time until the work may run, and whether
// it was started before.
func turnAfter(ctx context.Context, l *Limiter, verb, id string,
	change func(life *reserved.Life, ctx context.Context, r *reserved.Reservation) (wait time.Duration, restarted bool,
		err error),
) (turn Turn, err error) {
	err = withReservation(ctx, l, verb, id, turning(&turn, change))
	return turn, err
}

// turning returns a function that makes a change of a locked reservation, saves it, and sets turn.
func turning(turn *Turn,
	change func(life *reserved.Life, ctx context.Context, r *reserved.Reservation) (wait time.Duration, restarted bool,
		err error),
) func(ctx context.Context, life *reserved.Life, r *reserved.Reservation) error {
	return func(ctx context.Context, life *reserved.Life, r *reserved.Reservation) error {
		wait, restarted, err := change(life, ctx, r)
		if err != nil {
			return err
		}
		*turn = Turn{
			ID: r.ID, State: ReservationState(r.State), Wait: wait,
			ReadyAt: time.UnixMicro(r.ReadyUs), StaleAt: optionalTime(r.StaleUs), Restarted: restarted,
		}
		return life.Save(ctx, r)
	}
}

// Started reports whether the work of a reservation was started. It returns ErrNotReserved if the reservation does not
// exist.
func (l *Limiter) Started(ctx context.Context, id string) (bool, error) {
	started := false
	err := withReservation(ctx, l, "started", id,
		func(_ context.Context, _ *reserved.Life, r *reserved.Reservation) error {
			started = r.StartedUs != nil
			return nil
		})
	return started, err
}

// Renew reserves the cost of a reservation again and returns the new turn. Use it for another attempt that must pay, or
// for work that runs although it was cancelled. In every state, the reservation becomes open and not started. If the
// owed tokens would exceed MaxReserved, nothing changes, and Wait is the time until Renew can succeed. It returns
// ErrNotReserved if the reservation does not exist.
//
// Renew uses the rule of the limit, or otherwise the policy that this Limiter last used the name with, for any key. If
// there is neither, it uses the policy of the reservation. It returns ErrCostExceedsCapacity if that policy can never
// give the cost. If the keys of one name have different policies in the code, Renew can use the policy of another key.
// Then call Settle and Reserve instead, or give each policy a name.
func (l *Limiter) Renew(ctx context.Context, id string) (Turn, error) {
	return turnAfter(ctx, l, "renew", id,
		func(life *reserved.Life, ctx context.Context, r *reserved.Reservation) (time.Duration, bool, error) {
			wait, err := life.Renew(ctx, r)
			return wait, false, err
		})
}
