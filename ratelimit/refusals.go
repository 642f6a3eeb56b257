package ratelimit

import (
	"context"
	"time"
)

// Refusal is a bucket that refused a Take or a Reserve, as [Config.Refused] is told of it.
type Refusal struct {
	// Limit is the limit's name.
	Limit string
	// Key is the key as it is stored: an HMAC where Config.HashKey is set, and "" of [Limit.Global].
	Key string
	// Route is what the call was made for; see [WithRoute].
	Route string
	// Rule is the name of the rule of Config.Policies that decided, as State.Rule.
	Rule string
	// Cost is what the call asked of the bucket.
	Cost float64
	// At is the instant of the decision on the database's clock.
	At time.Time
	// Shadow is whether nobody was turned away by it: the context is one of [WithShadow], or the limit is not enforced.
	Shadow bool
	// Cached is whether the decision came from the deny cache.
	Cached bool
	// Pending is whether it was made in a transaction that you began, which may be run again without the Limiter being
	// told.
	Pending bool
}

type routeKey struct{}

// WithRoute marks calls with the returned context as made for a route: what a guard in front of a handler guards, such as
// "POST /chat". [Config.Refused] is told. Guards of this module do it themselves. With an empty route it returns ctx.
func WithRoute(ctx context.Context, route string) context.Context {
	if route == "" {
		return ctx
	}
	return context.WithValue(ctx, routeKey{}, route)
}

// refusals tells the hook of the buckets that refused c, by the decision on it.
func (r *reports) refusals(ctx context.Context, c *call, d *Decision) {
	if c.Verb != verbTake && c.Verb != verbReserve {
		return
	}
	for i, of := range c.plan.asked {
		s, isFirst, cost := &d.States[i], true, 0.0
		if s.Allowed {
			continue
		}
		for j, a := range c.plan.asked {
			if a.bucket == of.bucket {
				isFirst, cost = isFirst && j >= i, cost+a.cost
			}
		}
		if isFirst {
			r.refusal(ctx, s, Refusal{Key: of.key, Cost: cost, At: d.At, Cached: c.cached != nil})
		}
	}
}

// refusal tells the hook of one refusal, with what the state of the bucket says of it. In a transaction of InTx the hook is
// told when that has ended: the attempt may be run again.
func (r *reports) refusal(ctx context.Context, s *State, told Refusal) {
	told.Limit, told.Rule = s.Limit.name, s.Rule
	told.Route, _ = ctx.Value(routeKey{}).(string)
	told.Shadow, told.Pending = inShadow(ctx) || s.Mode == Shadow || s.Mode == Off, r.pending()
	if r.after != nil {
		r.after.refused = append(r.after.refused, told)
		return
	}
	r.refused(ctx, told)
}

// refusedIn tells the hook of the refusals in the last attempt of a transaction of InTx; nil: it lost a conflict. A
// refusal mostly makes the transaction roll back, and is told for all that.
func (r *reports) refusedIn(ctx context.Context, last *afterCommit) {
	if last == nil {
		return
	}
	for _, told := range last.refused {
		r.refused(ctx, told)
	}
}
