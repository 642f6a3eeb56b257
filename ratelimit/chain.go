package ratelimit

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/ahead"
	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// A source is who answered a call.
type source int8

const (
	fromDatabase   source = iota
	fromRefusals          // the deny cache
	fromPrefetched        // tokens that this process took ahead
)

// isRemembered reports whether the answer is a refusal that was remembered.
func (s source) isRemembered() bool { return s == fromRefusals }

// recallOne is recall for a Take of one request without a price. It makes no call and no plan, which take as long as the rest.
func recallOne(ctx context.Context, l *Limiter, r *Request) (d Decision, known bool) {
	if ctx.Err() != nil {
		return d, false
	}
	key, err := storedKey(l.config.HashKey, r)
	if err != nil || r.pool != nil {
		return d, false
	}
	began, now := l.reports.began(), int64(0)
	s, of := subjectOf(ctx, l, verbTake, r, key, &now)
	if _, adapts := of.policy.(Adaptive); adapts || s.mode != On || s.pausedUntil > now || !(r.cost > 0) || checkCost(&of, r.cost, of.terms.Capacity) != nil {
		return d, false
	}
	asks := [1]bucket.Ask{{Key: bucket.Key{Name: of.name, Key: key}, Terms: of.terms, Policy: s.limit, Cost: r.cost}}
	states, at, from := recall(l, asks[:], []subject{s})
	if from == fromDatabase {
		return d, false
	}
	d = Decision{Allowed: true, At: time.UnixMicro(at), States: states}
	d.add(&states[0], true)
	if !d.Allowed && l.reports.refused != nil {
		l.reports.refusal(ctx, &states[0], Refusal{Key: key, Cost: r.cost, At: d.At, Cached: true})
	}
	l.reports.decided(ctx, Decided{Verb: verbTake, Decision: d, Cached: from.isRemembered()}, began)
	return d, true
}

// recall returns the states of the buckets of a Take, and the instant of the decision, if it can be decided on from memory: with
// prefetched tokens, or by a refusal that is remembered. It waits for nothing, and sends nothing.
func recall(l *Limiter, asks []bucket.Ask, of []subject) (states []State, at int64, from source) {
	if l.batcher.IsClosed() {
		return nil, 0, fromDatabase
	}
	var few [2]ahead.View
	if kept, taken := l.ahead.Take(asks, few[:0]); taken {
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
func statesOf(kept []ahead.View, asks []bucket.Ask, of []subject) (states []State, at int64) {
	at = math.MinInt64
	states, contents := room(len(kept))
	for i := range kept {
		told := kept[i].Tell(&contents[i])
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

// remember has the database decide on the call, and keeps its answer in memory. It may wait for tokens that are taken ahead for it and others.
func (c *call) remember(ctx context.Context, l *Limiter) error {
	if !c.recalls || !l.ahead.Serves(c.Asks) {
		return c.sendNoting(ctx, l)
	}
	kept, given, err := l.ahead.Do(ctx, c.Asks, func() ([]bucket.Answer, error) {
		if err := c.sendNoting(ctx, l); err != nil { // a batch that its caller has left goes on with the call
			return nil, err
		}
		return c.Answers, nil
	})
	if given {
		c.from = fromPrefetched
		c.states, c.at = statesOf([]ahead.View{kept}, c.Asks, c.plan.of)
	}
	return err
}

// sendNoting has the database decide on the call, in a batch with others if it can. It keeps a refusal in the deny cache, unless its
// buckets can have tokens before the end of their waits.
func (c *call) sendNoting(ctx context.Context, l *Limiter) error {
	if l.cache == nil || c.Look || c.Reserve != nil || c.UpTo > 0 || !c.plan.isPlain() || bucket.AnyFreesEarly(c.Asks) {
		return l.batcher.Do(ctx, c.Queueable())
	}
	var room [1]uint32 // as there mostly is one bucket
	sent := l.cache.Send(c.Asks, room[:0])
	err := l.batcher.Do(ctx, c.Queueable())
	if err == nil && !bucket.AllAllowed(c.Answers) {
		for i := range c.Asks {
			c.Asks[i].Policy = c.plan.of[i].holding(&c.Asks[i].Terms)
		}
		l.cache.Keep(sent, c.Asks, c.Answers)
	}
	return err
}

// keeping is a Limiter as package ahead knows it.
type keeping struct{ *Limiter }

// Fetch decides on a call that takes tokens ahead, in a batch with others.
func (l keeping) Fetch(ctx context.Context, c *store.Call) error {
	err := l.batcher.Do(ctx, c.Queueable())
	if err == nil && c.Answers[0].Allowed {
		l.reports.invalidate(c.Asks)
	}
	return err
}

// GiveBack returns tokens to a row. It reports an error, unless it is to be tried again.
func (l keeping) GiveBack(ctx context.Context, k bucket.Key, t bucket.Terms, kept bucket.Ahead, most time.Duration) (given float64, err error) {
	began := l.reports.began()
	defer func() {
		if failure := recover(); failure != nil { // of a hook of the program: it must not end the process
			err = prefixed(fmt.Errorf("return %q: a hook panicked: %v", k.Name, failure))
		}
		if err != nil && !(most > 0 && store.IsLockTimeout(err)) {
			l.reports.failed(ctx, Failed{Verb: "return", Limit: k.Name, Err: err}, began)
		}
	}()
	bounded, cancel := l.bounded(ctx)
	defer cancel()
	given, err = l.session.Return(bounded, k, t, kept, most)
	l.reports.invalidate([]bucket.Ask{{Key: k}})
	if err != nil {
		err = during(fmt.Sprintf("return %q", k.Name), l.explained(ctx, err))
	}
	return given, err
}

// Tell tells the observer what became of tokens that were taken ahead.
func (l keeping) Tell(e ahead.Event) { l.reports.tell(context.Background(), Prefetched(e)) }
