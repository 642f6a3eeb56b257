package prefetch

import (
	"context"
	"math"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const (
	// ofRow and ofCapacity bound the tokens that one process prefetches at once, so that other processes get some. They
	// are shares of the tokens in the row and of its capacity.
	ofRow, ofCapacity = 0.25, 0.125
	// usedUpSoon is the share of Terms.For within which the tokens are used up if more are taken the next time. Twice of
	// that is well within For, so that at a steady pace none are left over.
	usedUpSoon = 8
	// patience is how long a call waits for a fetch.
	patience = 250 * time.Millisecond
	// maxWaiting bounds the calls that wait for one fetch. Further calls go to the database.
	maxWaiting = 10_000
	// clockDrift bounds the difference of two clocks, as a share of the time, because a clock that is slewed runs by up to
	// 500 millionths too fast or too slow.
	clockDrift = 0.001
)

// holding is what a process knows and keeps of one key. The lock of its stripe guards it.
type holding struct {
	id      uint64            // the hash of the request
	request ratelimit.Request // with a cost of 0; calls for another one of that hash go to the database
	keep    time.Duration     // Terms.For
	timer   *time.Timer       // until the next look for unused tokens

	from   *stock        // nil: nothing was prefetched yet
	left   float64       // of its tokens
	usedAt time.Duration // when something was last asked for

	row     float64         // the tokens of the row, as the database last answered; 0: nothing may be prefetched
	limit   ratelimit.Limit // by which it answered
	numbers ratelimit.Spec  // of the limit
	pace    float64         // how many tokens to prefetch next, before the bounds
	askedAt time.Duration   // when a call last found too few

	fetch *fetch // nil: none is in progress
}

// fetch is a Take in progress, for which calls wait.
type fetch struct {
	waiting int
	done    chan struct{}
}

// awaitFetch waits for a fetch of the holding, and begins one if it pays. It returns false at once if there is nothing
// to wait for.
func (l *Limiter) awaitFetch(ctx context.Context, id uint64, of *ratelimit.Request, cost float64) bool {
	f := l.joinFetch(ctx, id, of, cost)
	if f == nil {
		return false
	}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-f.done:
	case <-timer.C:
	case <-ctx.Done():
	}
	return true
}

func (l *Limiter) joinFetch(ctx context.Context, id uint64, of *ratelimit.Request, cost float64) *fetch {
	now, s := l.now(), l.stripe(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.of[id]
	if h == nil || h.request != *of {
		return nil
	}
	if h.fetch == nil {
		h.asked(now, cost)
		ahead := h.ahead(cost)
		if ahead == 0 || !l.begin() {
			return nil
		}
		h.fetch = &fetch{done: make(chan struct{})}
		// The fetch goes on if the caller leaves: others need the tokens, and they would be lost.
		go l.fetch(context.WithoutCancel(ctx), s, h, cost+ahead)
	}
	if h.fetch.waiting >= maxWaiting {
		return nil
	}
	h.fetch.waiting++
	return h.fetch
}

// asked notes that a call found too few tokens. The pace doubles while they were used up soon, and halves when they
// were not within half of the time.
func (h *holding) asked(now time.Duration, cost float64) {
	switch gap := now - h.askedAt; {
	case gap < h.keep/usedUpSoon:
		h.pace = max(2*h.pace, cost)
	case gap > h.keep/2:
		h.pace /= 2
	}
	h.pace = min(h.pace, h.numbers.Capacity*ofCapacity)
	h.askedAt, h.usedAt = now, now
}

// ahead returns how many tokens to prefetch in addition to the cost of a call, for whole calls of that cost. It returns
// 0 if the row is nearly empty.
func (h *holding) ahead(cost float64) float64 {
	return max(math.Floor(min(h.pace, (h.row-cost)*ofRow)/cost)*cost, 0)
}

// fetch takes tokens from the row. A panic of a hook of the program loses them, and the calls that wait go to the
// database.
func (l *Limiter) fetch(ctx context.Context, s *stripe, h *holding, tokens float64) {
	defer l.busy.Done()
	var rest []leftover
	fetched := Event{Limit: h.request.Limit()}
	defer func() {
		_ = recover()
		l.giveBack(context.Background(), rest)
		l.report(fetched)
	}()
	defer func() { // also after runtime.Goexit
		s.mu.Lock()
		defer s.mu.Unlock()
		close(h.fetch.done)
		h.fetch = nil
	}()
	sent := l.now()
	d, err := l.limiter.Take(ctx, h.request.Cost(tokens))
	if err != nil {
		return
	}
	heard := l.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	h.note(&d)
	if state := &d.States[0]; !state.Allowed || state.NotAsked {
		h.pace = 0
		return
	}
	rest = h.giveUp()
	h.from = &stock{state: d.States[0], at: d.At, taken: tokens, sent: sent, heard: heard}
	h.from.ends, h.from.resets = h.spans(&d, sent)
	h.left, fetched.Taken = tokens, tokens
	if s.of[h.id] != h { // Close didn't wait for it
		rest = h.giveUp()
	}
}

// spans returns until when tokens may be given out, and until when they can be returned: Terms.For, and forever, or
// less if their window ends sooner. The time counts from before the request for the decision.
func (h *holding) spans(d *ratelimit.Decision, sent time.Duration) (ends, resets time.Duration) {
	if h.numbers.Kind == ratelimit.KindTokenBucket {
		return sent + h.keep, math.MaxInt64
	}
	value := &d.States[0].Value
	left, err := value.RetryAfter(d.At, max(math.Nextafter(value.Tokens, math.Inf(1)), minCost))
	if err != nil { // the row is full, which it is not after a Take
		return sent, sent
	}
	left -= time.Duration(clockDrift*float64(left)) + time.Microsecond
	return sent + min(h.keep, left), sent + left
}

// noteAnswer notes the answer to a call that found too few tokens.
func (l *Limiter) noteAnswer(id uint64, of *ratelimit.Request, d *ratelimit.Decision, terms Terms) {
	now, s := l.now(), l.stripe(id)
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.of[id]
	if h == nil {
		if d.States[0].NotAsked || l.count.Load() >= maxHoldings || !l.isOpen() {
			return
		}
		h = &holding{id: id, request: *of, keep: terms.For, askedAt: now, usedAt: now}
		if s.of == nil {
			s.of = make(map[uint64]*holding)
		}
		s.of[id] = h
		l.count.Add(1)
		h.timer = time.AfterFunc(h.lookEvery(), func() { l.look(s, h) })
	}
	if h.request == *of {
		h.note(d)
	}
}

// note notes what the row holds, and 0 if nothing may be prefetched.
func (h *holding) note(d *ratelimit.Decision) {
	state := &d.States[0]
	if h.limit != state.Limit {
		h.limit, h.numbers = state.Limit, state.Limit.Spec()
	}
	h.row = 0
	if state.Mode == ratelimit.On && servable(&h.numbers) {
		h.row = state.Value.Tokens
	}
}
