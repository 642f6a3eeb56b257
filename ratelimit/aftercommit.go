package ratelimit

import (
	"context"
	"errors"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// afterCommit is what a transaction does beside its rows, kept until it has committed.
type afterCommit struct {
	changed []bucket.Key // buckets that tokens were taken from or given back to
	events  []Event
	refused []Refusal // to be told however it ends, with what nested transactions undid
}

// mark is how much there was at some moment.
type mark struct{ changed, events int }

func (a *afterCommit) mark() mark { return mark{len(a.changed), len(a.events)} }

// undo drops what came since the mark, as going back to a savepoint does with what was written since.
func (a *afterCommit) undo(to mark) {
	a.changed, a.events = a.changed[:min(to.changed, len(a.changed))], a.events[:min(to.events, len(a.events))]
}

// reports are who hears what the calls of a Limiter did: the observer, and the deny cache.
type reports struct {
	observer Observer
	refused  func(context.Context, Refusal)
	cache    *denyCache
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
			r.cache.invalidate(asks[i].Key)
		}
	}
}

// tell tells the observer of event: once the transaction has committed when that will be known, else at once.
func (r *reports) tell(ctx context.Context, event Event) {
	switch {
	case r.observer == nil:
	case r.after != nil:
		r.after.events = append(r.after.events, event)
	default:
		r.observer.Observe(ctx, event)
	}
}

// committed lets out what a transaction that has committed did.
func (r *reports) committed(ctx context.Context, after *afterCommit) {
	r.ended(after)
	for _, event := range after.events {
		r.tell(ctx, event)
	}
}

// ended has the deny cache forget the buckets that a transaction changed, or may have changed.
func (r *reports) ended(after *afterCommit) {
	for _, k := range after.changed {
		r.cache.invalidate(k)
	}
}

// done tells what a call that was answered did.
func (r *reports) done(ctx context.Context, c *call, d *Decision) {
	if r.cache != nil && (c.change != nil || d.Allowed && !c.Look) {
		r.invalidate(c.Asks)
	}
	if r.refused != nil {
		r.refusals(ctx, c, d)
	}
	if r.observer == nil || c.change != nil || c.untold {
		return
	}
	event := Decided{Verb: c.Verb, Decision: *d, Cached: c.cached != nil}
	if kept := c.Reservation; kept != nil {
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

// failed tells the observer of a failure of a call that began then, unless its caller gave up. What the
// transaction does afterwards does not undo it.
func (r *reports) failed(ctx context.Context, event Failed, began time.Time) {
	if r.observer == nil || errors.Is(ctx.Err(), context.Canceled) {
		return
	}
	event.Began, event.Elapsed, event.Shadow = began, r.elapsed(began), inShadow(ctx)
	r.observer.Observe(ctx, event)
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
