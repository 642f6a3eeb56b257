package ratelimit

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/arg"
	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/refusalcache"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// Observer receives events about a Limiter's calls: a [Decided], or one of package event. Observe runs on the call's
// goroutine before the call returns, so it must be quick, must not call the Limiter, and may run on many goroutines at
// once. For panics see [Config.Observer]. ctx has the values of the call's context, and may have ended.
//
// Events of InTx are reported when its transaction has ended, as an [event.Transacted], or an [event.Failed] if
// conflicts or lost connections used it up. If it rolled back, its refusals, failed calls and lost leases are reported,
// but not the events that the rollback undid. An attempt that lost a conflict reports an [event.Conflicted] in place of
// its events, and one that lost its connection none. Events of a transaction that you began are reported immediately,
// with Pending set.
type Observer interface {
	Observe(ctx context.Context, e event.Event)
}

// Decided is the event of a decision, allowed or refused. A failed call is an [event.Failed].
type Decided struct {
	// Verb is "take", "check", "reserve" or "acquire".
	Verb string
	// Decision is the decision that the call returned.
	Decision Decision
	// Delay is the time after the decision at which reserved work may run; 0 for other verbs.
	Delay time.Duration
	// Began is the time of the call on this process's clock. Elapsed is its duration, as the caller saw it.
	Began   time.Time
	Elapsed time.Duration
	// Cached reports whether the decision came from memory: from the refusal cache, or from package prefetch.
	Cached bool
	// Pending reports whether the decision was made in a transaction that may still roll back.
	Pending bool
}

// IsEvent marks it as an event.
func (Decided) IsEvent() {}

// Observers returns an Observer that passes each event to all observers, in this order. It leaves out nil ones, and
// returns nil if none is left.
func Observers(observers ...Observer) Observer {
	var told several
	for _, o := range observers {
		if !arg.IsNil(o) {
			told = append(told, o)
		}
	}
	switch len(told) {
	case 0:
		return nil
	case 1:
		return told[0]
	}
	return told
}

type recovering struct{ Observer }

func (r recovering) Observe(ctx context.Context, e event.Event) {
	defer func() { _ = recover() }()
	r.Observer.Observe(ctx, e)
}

type several []Observer

func (s several) Observe(ctx context.Context, e event.Event) {
	for _, o := range s {
		o.Observe(ctx, e)
	}
}

// Refusal is a bucket that refused a Take, a Reserve or an Acquire, as [Config.Refused] receives it.
type Refusal struct {
	// Limit is the limit's name.
	Limit string
	// Key is the stored form of the key: an HMAC if Config.HashKey is set, and "" for [Limit.Global].
	Key string
	// Route is the route of the call; see [WithRoute].
	Route string
	// Rule is the name of the rule of Config.Policies that decided, as in State.Rule.
	Rule string
	// Cost is the cost of the call for the bucket.
	Cost float64
	// At is the instant of the decision on the database's clock.
	At time.Time
	// Shadow reports whether the refusal turned no request away: the limit is not enforced.
	Shadow bool
	// Cached reports whether the decision came from the refusal cache.
	Cached bool
	// Pending reports whether the decision was made in a transaction that you began, which you may run again without the
	// Limiter knowing.
	Pending bool
}

// Allowance is a bucket that allowed a Take, a Reserve or an Acquire, as [Config.Allowed] receives it.
type Allowance struct {
	// Limit is the limit's name, and Key the stored form of the key, as in Refusal.
	Limit, Key string
	// Rule is the name of the rule of Config.Policies that decided, as in State.Rule.
	Rule string
	// Cost is the cost of the request in tokens.
	Cost float64
	// At is the instant of the decision on the database's clock.
	At time.Time
}

type routeKey struct{}

// WithRoute names the route that calls with the returned context are made for, such as "POST /chat", so that
// [Config.Refused] receives it. This module's guards do so themselves. An empty route changes nothing.
func WithRoute(ctx context.Context, route string) context.Context {
	if route == "" {
		return ctx
	}
	return context.WithValue(ctx, routeKey{}, route)
}

// afterCommit collects the effects of a transaction outside its rows, until it has ended.
type afterCommit struct {
	changed []bucket.Key // buckets whose tokens were taken or returned
	told    []notice
	failed  bool // whether a call reported a Failed
}

// notice is a report of a call in a transaction to the Observer or to Config.Refused.
type notice struct {
	tell     func()
	isUndone bool // whether a rollback makes it untrue
}

// mark is the length of both lists of an afterCommit.
type mark struct{ changed, told int }

func (a *afterCommit) mark() mark { return mark{len(a.changed), len(a.told)} }

// undo drops the changes since the mark, and the notices that a rollback to it makes untrue.
func (a *afterCommit) undo(to mark) {
	a.changed, to.told = a.changed[:min(to.changed, len(a.changed))], min(to.told, len(a.told))
	kept := slices.DeleteFunc(a.told[to.told:], func(n notice) bool { return n.isUndone })
	a.told = a.told[:to.told+len(kept)]
}

// reports are the receivers of what calls did: the Observer, Config.Refused and the refusal cache.
type reports struct {
	observer Observer
	refused  func(context.Context, Refusal)
	allowed  func(context.Context, Allowance)
	cache    *refusalcache.Cache
	inTx     bool         // whether the calls are part of a transaction
	after    *afterCommit // of that transaction; nil if the Limiter does not learn whether it commits
}

// invalidate removes refusals of changed buckets from the refusal cache: after the commit, or at once if the Limiter
// does not learn of it.
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

// tell reports event to the Observer: when the transaction has ended, or at once if the Limiter does not learn of that.
func (r *reports) tell(ctx context.Context, e event.Event) {
	switch {
	case r.observer == nil:
	case r.after != nil:
		observer := r.observer // with r in the closure, r would escape to the heap, also without an Observer
		r.after.told = append(r.after.told, notice{func() { observer.Observe(ctx, e) }, isUndone(e)})
	default:
		r.observer.Observe(ctx, e)
	}
}

// policyConflict reports to the Observer, or otherwise to slog, that one name has two policies. It does not wait for
// the end of a transaction.
func (r *reports) policyConflict(ctx context.Context, before, limit Limit) {
	if r.observer == nil {
		slog.WarnContext(ctx, "ratelimit: one name, two policies; give each limit its own name",
			slog.String("limit", limit.Name()),
			slog.String("before", before.Policy().String()), slog.String("policy", limit.Policy().String()))
		return
	}
	r.observer.Observe(ctx, event.PolicyConflict{Limit: limit.Name(), Before: before.Policy(), Policy: limit.Policy()})
}

// isUndone reports whether a rollback makes an event untrue. Refusals, failures and lost leases changed nothing, so
// they stay true.
func isUndone(e event.Event) bool {
	switch e := e.(type) {
	case Decided:
		return e.Decision.Allowed
	case event.LeaseChanged:
		return !e.Lost
	case event.Failed:
		return false
	}
	return true
}

// ended removes refusals of all buckets that a transaction changed, or may have changed, from the refusal cache.
func (r *reports) ended(after *afterCommit) {
	for i := range after.changed {
		r.cache.Forget(&after.changed[i])
	}
}

func (r *reports) done(ctx context.Context, c *call, d *Decision) {
	if c.change != nil || d.Allowed && !c.Look && !c.isRecalled() {
		r.invalidate(c.Asks)
	}
	if r.refused != nil {
		r.refusals(ctx, c, d)
	}
	if r.allowed != nil && d.Allowed {
		r.allowances(ctx, c, d)
	}
	if r.observer == nil || c.change != nil || c.untold {
		return
	}
	e := Decided{Verb: c.Verb, Decision: *d, Cached: c.isRecalled()}
	if kept := c.reservation(); kept != nil {
		e.Delay = time.UnixMicro(kept.ReadyUs).Sub(d.At)
	}
	r.decided(ctx, e, c.began)
}

// decided reports the decision on a call that began at began to the Observer.
func (r *reports) decided(ctx context.Context, e Decided, began time.Time) {
	if r.observer == nil {
		return
	}
	e.Began, e.Elapsed, e.Pending = began, r.elapsed(began), r.pending()
	r.tell(ctx, e)
}

// failed reports a failed call that began at began to the Observer. A call whose caller has left counts: if a database
// stalls and all callers leave, nothing else shows it.
func (r *reports) failed(ctx context.Context, e event.Failed, began time.Time) {
	if r.observer == nil {
		return
	}
	e.Began, e.Elapsed = began, r.elapsed(began)
	if r.after != nil {
		r.after.failed = true
	}
	r.tell(ctx, e)
}

// transacted reports a transaction of InTx that began at began, and that fn committed or rolled back.
func (r *reports) transacted(ctx context.Context, e event.Transacted, began time.Time) {
	if r.observer != nil {
		e.Began, e.Elapsed = began, r.elapsed(began)
		r.tell(ctx, e)
	}
}

// pending reports whether the call may still roll back without the Limiter knowing.
func (r *reports) pending() bool { return r.inTx && r.after == nil }

// began returns the current time if an Observer needs the duration of the call, and otherwise the zero time.
func (r *reports) began() time.Time {
	if r.observer == nil {
		return time.Time{}
	}
	return time.Now()
}

// elapsed returns the time since began, and 0 for the zero time.
func (r *reports) elapsed(began time.Time) time.Duration {
	if began.IsZero() {
		return 0
	}
	return time.Since(began)
}

func (c *call) asks() bool {
	return c.Verb == verbTake || c.Verb == verbReserve || c.Verb == verbAcquire
}

// allowances reports each bucket that allowed c to Config.Allowed: in InTx once the transaction has committed.
func (r *reports) allowances(ctx context.Context, c *call, d *Decision) {
	for i, of := range c.plan.asked {
		s := &d.States[i]
		if !c.asks() || !s.Allowed || s.NotAsked {
			continue
		}
		told := Allowance{Limit: s.Limit.Name(), Key: of.key, Rule: s.Rule, Cost: s.Cost, At: d.At}
		if r.after != nil {
			allowed, kept := r.allowed, told
			r.after.told = append(r.after.told, notice{func() { allowed(ctx, kept) }, true})
			continue
		}
		r.allowed(ctx, told)
	}
}

// refusals reports each bucket that refused c to Config.Refused.
func (r *reports) refusals(ctx context.Context, c *call, d *Decision) {
	if !c.asks() {
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
			r.refusal(ctx, s, Refusal{Key: of.key, Cost: cost, At: d.At, Cached: c.isRecalled()})
		}
	}
}

// refusal reports one refusal to Config.Refused, with the fields of the state. In InTx it waits until the transaction
// has ended, because the attempt may run again.
func (r *reports) refusal(ctx context.Context, s *State, told Refusal) {
	told.Limit, told.Rule = s.Limit.Name(), s.Rule
	told.Route, _ = ctx.Value(routeKey{}).(string)
	told.Shadow, told.Pending = s.Mode == Shadow || s.Mode == Off, r.pending()
	if r.after != nil {
		refused, kept := r.refused, told
		r.after.told = append(r.after.told, notice{tell: func() { refused(ctx, kept) }})
		return
	}
	r.refused(ctx, told)
}
