package ratelimit

import (
	"context"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/deny"
)

// A source is who answered a call.
type source int8

const (
	fromDatabase   source = iota
	fromRefusals          // the deny cache
	fromPrefetched        // tokens that this process took ahead
)

// recallOne is recall for a Take of one request of a plain limit. It makes no call and no plan, which take as long as the rest.
func (l *Limiter) recallOne(ctx context.Context, requests []Request) (d Decision, known bool) {
	if l == nil || l.pool == nil || len(requests) != 1 || ctx.Err() != nil || l.cache == nil && l.prefetched.count.Load() == 0 {
		return d, false
	}
	r := &requests[0]
	key, err := storedKey(l.config.HashKey, r)
	if err != nil || r.pool != nil {
		return d, false
	}
	began, now := l.reports.began(), int64(0)
	s, of := subjectOf(ctx, l, verbTake, r, key, &now)
	if !of.plain || s.mode != On || s.isPaused(now) || !(r.cost > 0) || checkCost(&of, r.cost, of.terms.Capacity) != nil {
		return d, false
	}
	asks := [1]bucket.Ask{{Key: bucket.Key{Name: of.name, Key: key}, Terms: of.terms, Policy: s.limit, Cost: r.cost}}
	states, at, from := l.recall(asks[:], []subject{s})
	if from == fromDatabase {
		return d, false
	}
	d = Decision{Allowed: true, At: time.UnixMicro(at), States: states}
	d.add(&states[0], true)
	if !d.Allowed && l.reports.refused != nil {
		l.reports.refusal(ctx, &states[0], Refusal{Key: key, Cost: r.cost, At: d.At, Cached: true})
	}
	l.reports.decided(ctx, Decided{Verb: verbTake, Decision: d, Cached: from == fromRefusals}, began)
	return d, true
}

// recall returns the states of the buckets of a Take, and the instant of the decision, if it can be decided on from memory: with
// prefetched tokens, or by a refusal that is remembered. It waits for nothing, and sends nothing.
func (l *Limiter) recall(asks []bucket.Ask, of []subject) (states []State, at int64, from source) {
	if l.batcher.IsClosed() {
		return nil, 0, fromDatabase
	}
	var few [2]view
	if kept, ok := l.prefetched.take(asks, few[:0]); ok {
		states, at = statesOf(kept, asks, of)
		return states, at, fromPrefetched
	}
	var room [2]bucket.Told
	told, refused := l.cache.Refuse(asks, room[:0])
	if !refused {
		return nil, 0, fromDatabase
	}
	states, at = make([]State, len(told)), told[0].Now
	for i := range told {
		states[i].tell(&told[i], &asks[i], &of[i])
		at = max(at, told[i].Now)
	}
	return states, at, fromRefusals
}

// statesOf returns the states of buckets that gave prefetched tokens, and the instant of the decision.
func statesOf(kept []view, asks []bucket.Ask, of []subject) (states []State, at int64) {
	states, contents := room(len(kept))
	at = kept[0].at
	for i := range kept {
		told := kept[i].tell(&contents[i])
		states[i].Prefetched = true
		states[i].tell(&told, &asks[i], &of[i])
		at = max(at, told.Now)
	}
	return states, at
}

// tell sets what the state says of a bucket by what a memory tells of it.
func (s *State) tell(told *bucket.Told, a *bucket.Ask, of *subject) {
	s.set(of.holding(&told.Terms), a, told)
	of.tell(s, &told.Terms)
}

// send has the database decide on the call, in a batch with others if it can. A refusal of limits that keep their word is remembered.
func (c *call) send(ctx context.Context, l *Limiter) error {
	if l.cache == nil || c.Look || c.Reserve != nil || c.UpTo > 0 || !c.plan.isPlain() || bucket.AnyFreesEarly(c.Asks) {
		return l.batcher.Do(ctx, c.Queueable())
	}
	var sent deny.Sent
	l.cache.Send(&sent, c.Asks)
	err := l.batcher.Do(ctx, c.Queueable())
	if err == nil && !bucket.AllAllowed(c.Answers) {
		for i := range c.Asks {
			c.Asks[i].Policy = c.plan.of[i].holding(&c.Asks[i].Terms)
		}
		l.cache.Keep(&sent, c.Asks, c.Answers)
	}
	return err
}
