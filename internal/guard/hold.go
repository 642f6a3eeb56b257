package guard

import (
	"context"
	"errors"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/arg"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// IsHeld reports whether the limit has slots to hold and release, as a Concurrency has.
func IsHeld(limit ratelimit.Limit) bool {
	_, held := limit.Policy().(ratelimit.Concurrency)
	return held
}

// Take takes the costs of requests, all or nothing. ctx is one of Deciding. If one of the limits has slots to hold, it
// acquires them all. The lease of that has an ID, and is for Hold.
func Take(ctx context.Context, limiter *ratelimit.Limiter, requests []ratelimit.Request) (ratelimit.Lease, error) {
	held := isAnyHeld(limiter, requests)
	lease, err := take(ctx, limiter, held, requests)
	if errors.Is(err, ratelimit.ErrInvalidRequest) && limiter.HasPolicies() && isAnyHeld(limiter, requests) != held {
		return take(ctx, limiter, !held, requests) // a stored rule has changed the kind meanwhile
	}
	return lease, err
}

func take(ctx context.Context, limiter *ratelimit.Limiter, held bool,
	requests []ratelimit.Request,
) (ratelimit.Lease, error) {
	if held {
		return limiter.Acquire(arg.FollowRules(ctx), requests...)
	}
	d, err := limiter.Take(ctx, requests...)
	return ratelimit.Lease{Decision: d}, err
}

// isAnyHeld reports whether a limit of the requests is held, by the policy that decides now.
func isAnyHeld(limiter *ratelimit.Limiter, requests []ratelimit.Request) bool {
	for _, request := range requests {
		limit := request.Limit()
		if limiter.HasPolicies() && limit.Policy() != nil {
			limit = limiter.Resolve(request)
		}
		if IsHeld(limit) {
			return true
		}
	}
	return false
}

// releaseShare is the share of the time for a decision that the end of a handler waits at most for its slot to be free.
// A client with as many requests in progress as slots would be refused its next request if it had its answer before the
// release. Of two clients in two slots that send one request after the other, 70 to 90 of 100 requests were refused.
// The bound keeps the wait short if the database does not answer.
const releaseShare = 10

// Hold keeps the lease for a handler. The context for it is ctx if no slot of an enforced limit is held. Otherwise the
// context ends when the lease is lost. Call release when the handler has returned or panicked. It reports a lost lease.
// It waits a tenth of the timeout for its slot to be free, passes on a panic of a hook within that time, and drops a
// later one.
func (g *Gate) Hold(ctx context.Context, route string, lease ratelimit.Lease) (held context.Context, release func()) {
	if lease.ID == "" {
		return ctx, func() {}
	}
	kept, end := g.Limiter.KeepAlive(ctx, lease)
	held = ctx
	limit, enforced := heldLimit(lease.Decision)
	if enforced {
		held = kept
	}
	return held, func() {
		released := make(chan any, 1)
		go func() {
			defer func() { released <- recover() }()
			end()
		}()
		timer := time.NewTimer(g.Timeout / releaseShare)
		defer timer.Stop()
		select {
		case panicked := <-released:
			if panicked != nil {
				panic(panicked)
			}
		case <-timer.C:
		}
		if lost := context.Cause(kept); errors.Is(lost, ratelimit.ErrLeaseLost) &&
			!errors.Is(context.Cause(ctx), ratelimit.ErrLeaseLost) {
			// and not because a guard around this one has lost its own
			g.Tell(ctx, event.Answered{Route: route, Limit: limit, Result: LeaseLost, Shadow: !enforced, Err: lost})
		}
	}
}

// heldLimit returns the name of the limit whose slots are held, and whether it is enforced. Of several limits it
// returns the first one, and an enforced one before others.
func heldLimit(d ratelimit.Decision) (limit string, enforced bool) {
	for i := range d.States {
		s := &d.States[i]
		switch {
		case !IsHeld(s.Limit):
		case s.Mode == ratelimit.On:
			return s.Limit.Name(), true
		case limit == "":
			limit = s.Limit.Name()
		}
	}
	return limit, false
}
