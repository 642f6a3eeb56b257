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

// source says where the answer of a call came from.
type source int8

const (
	fromDatabase   source = iota
	fromRefusals          // the refusal cache
	fromPrefetched        // prefetched tokens
)

// isRemembered reports whether the answer is a refusal from the refusal cache.
func (s source) isRemembered() bool { return s == fromRefusals }

// recallOne is recall for a Take of one request without a price. It makes no call and no plan, which would double its time.
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

// recall decides a Take from memory if it can: with prefetched tokens, or a refusal in the refusal cache. It returns the states of
// the buckets and the time of the decision. It neither waits nor sends anything.
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

// statesOf returns the states of buckets that gave prefetched tokens, and the time of the decision.
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

// tell sets the state from the answer of the refusal cache or of prefetched tokens.
func (s *State) tell(told *bucket.Told, a *bucket.Ask, of *subject) {
	s.set(of.holding(&told.Terms), a, told)
	of.tell(s, &told.Terms)
}

// remember executes the call, with prefetched tokens if it can. It may wait until tokens are prefetched for it and other calls.
func (c *call) remember(ctx context.Context, l *Limiter) error {
	if !c.recalls || !l.ahead.Serves(c.Asks) {
		return c.sendNoting(ctx, l)
	}
	kept, given, err := l.ahead.Do(ctx, c.Asks, func() ([]bucket.Answer, error) {
		if err := c.sendNoting(ctx, l); err != nil { // the batch may still use the call after its caller has left
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

// sendNoting executes the call in the database, in a batch if possible. It stores a refusal in the refusal cache, unless the
// buckets can gain tokens before their waits end.
func (c *call) sendNoting(ctx context.Context, l *Limiter) error {
	if l.cache == nil || c.Look || c.Reserve != nil || c.UpTo > 0 || !c.plan.isPlain() || bucket.AnyHolds(c.Asks) {
		return l.batcher.Do(ctx, c.Queueable())
	}
	var room [1]uint32 // most calls have one bucket
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

// keeping adapts a Limiter to package ahead.
type keeping struct{ *Limiter }

// Fetch executes a call that prefetches tokens, in a batch with others.
func (l keeping) Fetch(ctx context.Context, c *store.Call) error {
	err := l.batcher.Do(ctx, c.Queueable())
	if err == nil && c.Answers[0].Allowed {
		l.reports.invalidate(c.Asks)
	}
	return err
}

// GiveBack returns tokens to a row. It reports an error to the Observer, unless the caller will try again.
func (l keeping) GiveBack(ctx context.Context, k bucket.Key, t bucket.Terms, kept bucket.Ahead, most time.Duration) (given float64, err error) {
	began := l.reports.began()
	defer func() {
		if failure := recover(); failure != nil { // a panic in a hook of the program must not end the process
			err = prefixed(fmt.Errorf("return %q: a hook panicked: %v", k.Name, failure))
		}
		if err != nil && !(most > 0 && store.IsLockTimeout(err)) {
			l.reports.failed(ctx, Failed{Verb: "return", Limit: k.Name, Err: err}, began)
		}
	}()
	bounded, cancel := l.config.bounded(ctx)
	defer cancel()
	given, err = l.session.Return(bounded, k, t, kept, most)
	l.reports.invalidate([]bucket.Ask{{Key: k}})
	if err != nil {
		err = explained(ctx, l.Limiter, fmt.Sprintf("return %q", k.Name), err)
	}
	return given, err
}

// Tell reports the use of prefetched tokens to the Observer.
func (l keeping) Tell(e ahead.Event) { l.reports.tell(context.Background(), Prefetched(e)) }
