package ratelimit

import (
	"context"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

// recallOne is recall for a Take of one request. It makes no call and no plan, which would double its time.
func recallOne(ctx context.Context, l *Limiter, r *Request) (d Decision, refused bool) {
	if ctx.Err() != nil {
		return d, false
	}
	key, err := storedKey(l.config.HashKey, r)
	if err != nil {
		return d, false
	}
	began, now := l.reports.began(), int64(0)
	s, of := subjectOf(ctx, l, verbTake, r, key, &now)
	if s.mode != On || s.pausedUntil > now || !(r.cost > 0) || checkCost(&of, r.cost, of.terms.Capacity) != nil {
		return d, false
	}
	asks := [1]bucket.Ask{{Key: bucket.Key{Name: of.name, Key: key}, Terms: of.terms, Policy: s.limit, Cost: r.cost}}
	states, at := recall(l, asks[:], []subject{s})
	if states == nil {
		return d, false
	}
	d = Decision{Allowed: true, At: time.UnixMicro(at), States: states}
	d.add(&states[0], true)
	if l.reports.refused != nil {
		l.reports.refusal(ctx, &states[0], Refusal{Key: key, Cost: r.cost, At: d.At, Cached: true})
	}
	l.reports.decided(ctx, Decided{Verb: verbTake, Decision: d, Cached: true}, began)
	return d, true
}

// recall refuses a Take with a refusal in the refusal cache. It returns the states of the buckets, or nil if it knows
// none, and the time of the decision. It neither waits nor sends anything.
func recall(l *Limiter, asks []bucket.Ask, of []subject) (states []State, at int64) {
	if l.batcher.IsClosed() {
		return nil, 0
	}
	var room [2]bucket.Told
	told, refused := l.cache.Refuse(asks, room[:0])
	if !refused {
		return nil, 0
	}
	states, at = make([]State, len(told)), told[0].Now
	for i := range told {
		states[i].set(of[i].holding(&told[i].Terms), &asks[i], &told[i])
		of[i].tokens = told[i].Tokens * float64(of[i].shards)
		of[i].tell(&states[i], &told[i].Terms)
		at = max(at, told[i].Now)
	}
	return states, at
}

// askNoting is ask. Outside transactions it stores a refusal in the refusal cache, unless the buckets
// can gain tokens before their waits end.
func (c *call) askNoting(ctx context.Context, l *Limiter) error {
	if l.pool == nil || l.cache == nil || c.Look || c.Reserve != nil || !c.plan.isPlain() || bucket.AnyHolds(c.Asks) {
		return c.ask(ctx, l)
	}
	var room [1]uint32 // most calls have one bucket
	sent := l.cache.Send(c.Asks, room[:0])
	err := c.ask(ctx, l)
	if err == nil && !bucket.AllAllowed(c.Answers) {
		for i := range c.Asks {
			c.Asks[i].Policy = c.plan.of[i].holding(&c.Asks[i].Terms)
		}
		l.cache.Keep(sent, c.Asks, c.Answers)
	}
	return err
}
