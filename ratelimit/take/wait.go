package take

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const (
	// Wait settles its reservation before ReadyAt, so that the caller is not late by a commit: by leads times the
	// duration of Reserve, and at most by mostLead.
	leads    = 4
	mostLead = 100 * time.Millisecond

	// endTimeout bounds the calls that end a reservation. They do not run on the caller's context, which may have
	// ended.
	endTimeout = 10 * time.Second
)

// Wait takes the requests' costs as soon as the tokens are available, and returns then. If they are available now, it
// sends one Take. Otherwise it reserves, as [ratelimit.Limiter.Reserve] does, and sleeps until ReadyAt, so callers are
// served in the order of their reservations, also across processes, and small requests can't overtake a large one. It
// returns the reservation's decision, whose At is the time of the reservation.
//
// If the tokens come after the context's deadline, Wait reserves nothing and returns the refusal immediately. It passes
// the time left to [ratelimit.Request.MaxWait], so RetryAfter is the time after which a call with the same time left
// would be served, if there are no other callers. Wait also refuses if more than a policy's MaxReserved would be owed.
//
// If the context ends during the sleep, Wait cancels the reservation and returns the context's error, and other callers
// can take the tokens. If the database is unreachable or the process dies, the reservation stays open until
// [ratelimit.Limiter.Expire] ends it, Config.ExpireAfter after ReadyAt, and its tokens return only if
// Config.ReleaseExpired is set. If the context ends during the statement of a Take, it's unknown whether it took
// tokens, as with every Take.
//
// Wait sleeps without a connection, by this process's clock. Shortly before ReadyAt it asks the database for the
// remaining time, with [ratelimit.Limiter.Start], and sleeps on if this process's clock is fast or the limit was paused
// meanwhile. Then it settles the reservation and sleeps until ReadyAt, even if the context ends, which takes at most a
// tenth of a second.
//
// Other calls can end the reservation during the sleep. If it was cancelled, Wait returns ErrReservationEnded. If it
// was settled, or expired and kept its tokens, Wait returns at ReadyAt. If it expired and returned them, Wait reserves
// again.
//
// On a Limiter of WithTx it returns ErrInvalidConfig, because it would sleep with rows locked. For a limit without
// reservations, such as a sliding window, it returns ErrNoReservations, even while tokens are available.
func Wait(ctx context.Context, l *ratelimit.Limiter, requests ...ratelimit.Request) (ratelimit.Decision, error) {
	if err := checkOutside(l, "Wait"); err != nil {
		return ratelimit.Decision{}, err
	}
	if err := checkReservable(l, requests); err != nil {
		return ratelimit.Decision{}, err
	}
	d, err := l.Take(ctx, requests...)
	switch {
	case errors.Is(err, ratelimit.ErrCostExceedsCapacity): // a reservation can still pay it
	case err != nil, d.Allowed:
		return d, err
	}
	began := time.Now()
	r, err := l.Reserve(ctx, within(ctx, requests)...)
	if err != nil || !r.Allowed {
		return r.Decision, err
	}
	lead := min(leads*time.Since(began), mostLead)
	if err := settleTurn(ctx, l, r.ID, r.Delay(), lead); err != nil {
		return ratelimit.Decision{}, giveUp(ctx, l, r.ID, err)
	}
	return r.Decision, nil
}

// checkReservable returns an error for a limit without reservations, before a Take of available tokens hides it.
func checkReservable(l *ratelimit.Limiter, requests []ratelimit.Request) error {
	for _, r := range requests {
		if l == nil || r.Limit() == (ratelimit.Limit{}) || l.Mode(r) != ratelimit.On {
			continue // Take returns the error, or nothing is enforced
		}
		limit := l.Resolve(r)
		if limit.Spec().Kind == ratelimit.KindConcurrency {
			continue // Take returns the error
		}
		if _, free := limit.Global().FullValue(time.Time{}).Reserve(time.Time{}, 0); !free.Allowed {
			return fmt.Errorf("%w: wait for %q, which is %v; call Take, and again after its RetryAfter",
				ratelimit.ErrNoReservations, limit.Name(), limit.Policy())
		}
	}
	return nil
}

// within returns the requests with the time until the deadline of ctx as a bound.
func within(ctx context.Context, requests []ratelimit.Request) []ratelimit.Request {
	deadline, bounded := ctx.Deadline()
	if !bounded {
		return requests
	}
	all, left := make([]ratelimit.Request, len(requests)), time.Until(deadline)
	for i, r := range requests {
		all[i] = r.MaxWait(left)
	}
	return all
}

// settleTurn sleeps until the turn of a reservation, and settles it up to lead before.
func settleTurn(ctx context.Context, l *ratelimit.Limiter, id string, wait, lead time.Duration) error {
	turn, asked, err := untilTurn(ctx, l, id, wait, lead)
	if err != nil {
		return err
	}
	if turn.State == ratelimit.Open {
		if err := toTheEnd(ctx, func(ctx context.Context) error { return l.Settle(ctx, id) }); err != nil {
			return err
		}
	}
	time.Sleep(time.Until(asked.Add(turn.Wait))) // settled tokens are not returned, so ctx does not matter
	return nil
}
