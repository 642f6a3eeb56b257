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
	if err := l.readyFor(ctx, "start", id); err != nil {
		return Turn{}, err
	}
	var lost *reserved.Reservation
	if len(again) > 0 {
		var err error
		if lost, err = recordOf(ctx, l, again); err != nil {
			return Turn{}, during("start", err)
		}
	}
	keyed := slices.ContainsFunc(again, func(r Request) bool { return !r.stored })
	paused := pausedUntil(ctx, l, id)
	return turnBy(ctx, l, "start", id, keyed, func(ctx context.Context, life *reserved.Life) (reserved.Turn, error) {
		return life.Start(ctx, id, paused, lost)
	})
}

// pausedUntil returns the end of the pauses of a reservation's limit. It returns nil if only the reservation's row says
// which limits it has.
func pausedUntil(ctx context.Context, l *Limiter, id string) *int64 {
	if l.config.Policies == nil {
		return new(int64)
	}
	at, known := l.places.Of(id)
	last := l.policies.last(at.Key.Name)
	if !known || at.Several || last == nil {
		return nil
	}
	if rule := ruleFor(ctx, l, "start", *last, at.Plan, at.Key.Key); rule != nil {
		return &rule.pausedUntil
	}
	return new(int64)
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

// turnBy returns the turn of a reservation that change returns.
func turnBy(ctx context.Context, l *Limiter, verb, id string, keyed bool,
	change func(ctx context.Context, life *reserved.Life) (reserved.Turn, error),
) (turn Turn, err error) {
	var t reserved.Turn
	err = lockedBy(ctx, l, verb, id, keyed,
		func(ctx context.Context, life *reserved.Life) (_ *reserved.Reservation, err error) {
			t, err = change(ctx, life)
			return t.Reservation, err
		},
		func(context.Context, *reserved.Life, *reserved.Reservation) error {
			turn = Turn{
				ID: t.ID, State: ReservationState(t.State), Wait: t.Wait,
				ReadyAt: time.UnixMicro(t.ReadyUs), StaleAt: optionalTime(t.StaleUs), Restarted: t.Restarted,
			}
			return nil
		})
	return turn, err
}

// Started reports whether the work of a reservation was started. It returns ErrNotReserved if the reservation does not
// exist.
func (l *Limiter) Started(ctx context.Context, id string) (bool, error) {
	if err := l.readyFor(ctx, "started", id); err != nil {
		return false, err
	}
	started := false
	err := lockedBy(ctx, l, "started", id, false,
		func(ctx context.Context, life *reserved.Life) (*reserved.Reservation, error) {
			return life.Lock(ctx, "started", id)
		},
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
	if err := l.readyFor(ctx, "renew", id); err != nil {
		return Turn{}, err
	}
	return turnBy(ctx, l, "renew", id, false, func(ctx context.Context, life *reserved.Life) (reserved.Turn, error) {
		return life.Renew(ctx, id)
	})
}
