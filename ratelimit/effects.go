package ratelimit

import (
	"context"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// effects are what a transaction does beside its rows, kept until it has committed.
type effects struct {
	changed []bucket.Key // buckets that tokens were taken from or given back to
	events  []Event
}

// mark is how many effects there were at some moment.
type mark struct{ changed, events int }

func (e *effects) mark() mark { return mark{len(e.changed), len(e.events)} }

// undo drops the effects since the mark, as going back to a savepoint does with what was written since.
func (e *effects) undo(to mark) {
	e.changed, e.events = e.changed[:min(to.changed, len(e.changed))], e.events[:min(to.events, len(e.events))]
}

// invalidate notes that tokens were taken from the plan's buckets or given back to them, so that no refusal from before
// is repeated from memory: once the transaction has committed or, when nobody says when that is, at once.
func (l *Limiter) invalidate(p *plan) {
	switch {
	case l.denials == nil:
	case l.effects != nil:
		for i := range p.buckets {
			l.effects.changed = append(l.effects.changed, p.buckets[i].bucketKey())
		}
	default:
		for i := range p.buckets {
			l.denials.drop(p.buckets[i].bucketKey())
		}
	}
}

// drop forgets what is known of buckets that a transaction changed, or may have changed.
func (l *Limiter) drop(changed []bucket.Key) {
	for _, k := range changed {
		l.denials.drop(k)
	}
}

// tell tells the observer of event: once the transaction has committed when that will be known, else at once.
func (l *Limiter) tell(ctx context.Context, event Event) {
	switch {
	case l.config.Observer == nil:
	case l.effects != nil:
		l.effects.events = append(l.effects.events, event)
	default:
		l.config.Observer.Observe(ctx, event)
	}
}

// Observe tells the Observer of event, when there is one: for guards that ask this Limiter, which tell what
// they [Answered].
func (l *Limiter) Observe(ctx context.Context, event Event) { l.tell(ctx, event) }

// committed lets out the effects of a transaction that has committed.
func (l *Limiter) committed(ctx context.Context, e *effects) {
	l.drop(e.changed)
	for _, event := range e.events {
		l.tell(ctx, event)
	}
}

// pending reports whether what the call did may still be rolled back without the Limiter being told.
func (l *Limiter) pending() bool { return l.pool == nil && l.effects == nil }

// since returns how long ago began was, and 0 when nobody asks.
func (l *Limiter) since(began time.Time) time.Duration {
	if began.IsZero() {
		return 0
	}
	return time.Since(began)
}

// watch returns the time, when an observer wants to know how long a call takes.
func (l *Limiter) watch() time.Time {
	if l == nil || l.config.Observer == nil {
		return time.Time{}
	}
	return time.Now()
}
