package ratelimit

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/deny"
)

// Refusal is a bucket that refused a Take, a Reserve or an Acquire, as [Config.Refused] is told of it.
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

// afterCommit is what a transaction does beside its rows, kept until it has ended.
type afterCommit struct {
	changed []bucket.Key // buckets that tokens were taken from or given back to
	told    []notice
}

// notice tells the Observer or the hook for refusals what a call in a transaction did.
type notice struct {
	tell     func()
	isUndone bool // whether a rollback makes it untrue
}

// mark is the length of the lists of an afterCommit.
type mark struct{ changed, told int }

func (a *afterCommit) mark() mark { return mark{len(a.changed), len(a.told)} }

// undo drops the changes since the mark, and the notices that are untrue after a rollback to it.
func (a *afterCommit) undo(to mark) {
	a.changed, to.told = a.changed[:min(to.changed, len(a.changed))], min(to.told, len(a.told))
	kept := slices.DeleteFunc(a.told[to.told:], func(n notice) bool { return n.isUndone })
	a.told = a.told[:to.told+len(kept)]
}

// reports are who hears what the calls of a Limiter did: the observer, the hook for refusals, and the deny cache.
type reports struct {
	observer Observer
	refused  func(context.Context, Refusal)
	cache    *deny.Cache
	inTx     bool         // whether the calls are part of a transaction
	after    *afterCommit // of that transaction; nil when nobody will say whether it has committed
}

// invalidate notes that tokens were taken from the buckets or given back to them, so that no refusal from before
// is repeated from memory: once the transaction has committed or, when nobody says when that is, at once.
func (r *reports) invalidate(asks []bucket.Ask) {
	switch {
	case r.cache == nil:
	case r.after != nil:
		for i := range asks {
			r.after.changed = append(r.after.changed, asks[i].Key)
		}
	default:
		for i := range asks {
			r.cache.Forget(&asks[i].Key)
		}
	}
}

// tell tells the observer of event: once the transaction has ended when that will be known, else at once.
func (r *reports) tell(ctx context.Context, event Event) {
	switch {
	case r.observer == nil:
	case r.after != nil:
		observer := r.observer // else r escapes to the heap, in calls without an observer, too
		r.after.told = append(r.after.told, notice{func() { observer.Observe(ctx, event) }, isUndone(event)})
	default:
		r.observer.Observe(ctx, event)
	}
}

// redefined tells the observer, or else slog, that one name has two policies, whatever becomes of the transaction.
func (r *reports) redefined(ctx context.Context, before, limit Limit) {
	if r.observer == nil {
		slog.WarnContext(ctx, "ratelimit: one name, two policies; give each limit its own name", slog.String("limit", limit.Name()),
			slog.String("before", before.Policy().String()), slog.String("policy", limit.Policy().String()))
		return
	}
	r.observer.Observe(ctx, Redefined{Limit: limit.Name(), Before: before.Policy(), Policy: limit.Policy()})
}

// isUndone reports whether a rollback makes an event untrue: a refusal, a failure and a lost lease have changed nothing.
func isUndone(event Event) bool {
	switch e := event.(type) {
	case Decided:
		return e.Decision.Allowed
	case Leased:
		return !e.Lost
	case Failed:
		return false
	}
	return true
}

// ended has the deny cache forget the buckets that a transaction changed, or may have changed.
func (r *reports) ended(after *afterCommit) {
	for i := range after.changed {
		r.cache.Forget(&after.changed[i])
	}
}

// done tells what a call that was answered did.
func (r *reports) done(ctx context.Context, c *call, d *Decision) {
	if c.change != nil || d.Allowed && !c.Look && c.from == fromDatabase {
		r.invalidate(c.Asks)
	}
	if c.quiet && !d.Allowed {
		return
	}
	if r.refused != nil {
		r.refusals(ctx, c, d)
	}
	if r.observer == nil || c.change != nil || c.untold {
		return
	}
	event := Decided{Verb: c.Verb, Decision: *d, Cached: c.from.isRemembered()}
	if kept := c.reservation(); kept != nil {
		event.Delay = time.UnixMicro(kept.ReadyUs).Sub(d.At)
	}
	r.decided(ctx, event, c.began)
}

// decided tells the observer of a decision on a call that began then.
func (r *reports) decided(ctx context.Context, event Decided, began time.Time) {
	if r.observer == nil {
		return
	}
	event.Began, event.Elapsed, event.Shadow, event.Pending = began, r.elapsed(began), inShadow(ctx), r.pending()
	r.tell(ctx, event)
}

// failed tells the observer of a failure of a call that began then, unless its caller gave up.
func (r *reports) failed(ctx context.Context, event Failed, began time.Time) {
	if r.observer == nil || errors.Is(ctx.Err(), context.Canceled) {
		return
	}
	event.Began, event.Elapsed, event.Shadow = began, r.elapsed(began), inShadow(ctx)
	r.tell(ctx, event)
}

// pending reports whether what the call did may still be rolled back without the Limiter being told.
func (r *reports) pending() bool { return r.inTx && r.after == nil }

// began returns the time when an observer wants to know how long a call takes.
func (r *reports) began() time.Time {
	if r.observer == nil {
		return time.Time{}
	}
	return time.Now()
}

// elapsed returns how long ago began was, and 0 when nobody asks.
func (r *reports) elapsed(began time.Time) time.Duration {
	if began.IsZero() {
		return 0
	}
	return time.Since(began)
}

// refusals tells the hook of the buckets that refused c, by the decision on it.
func (r *reports) refusals(ctx context.Context, c *call, d *Decision) {
	if c.Verb != verbTake && c.Verb != verbReserve && c.Verb != verbAcquire {
		return
	}
	for i, of := range c.plan.asked {
		s, isFirst, cost := &d.States[i], true, 0.0
		if s.Allowed {
			continue
		}
		for j, a := range c.plan.asked {
			if a.ask == of.ask && a.known == of.known {
				isFirst, cost = isFirst && j >= i, cost+a.cost
			}
		}
		if isFirst {
			r.refusal(ctx, s, Refusal{Key: of.key, Cost: cost, At: d.At, Cached: c.from.isRemembered()})
		}
	}
}

// refusal tells the hook of one refusal, with what the state of the bucket says of it, when a transaction of InTx has ended: the
// attempt may be run again.
func (r *reports) refusal(ctx context.Context, s *State, told Refusal) {
	told.Limit, told.Rule = s.Limit.Name(), s.Rule
	told.Route, _ = ctx.Value(routeKey{}).(string)
	told.Shadow, told.Pending = inShadow(ctx) || s.Mode == Shadow || s.Mode == Off, r.pending()
	if r.after != nil {
		refused, kept := r.refused, told
		r.after.told = append(r.after.told, notice{tell: func() { refused(ctx, kept) }})
		return
	}
	r.refused(ctx, told)
}
