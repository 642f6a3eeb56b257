package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// waiter is a call that waits for a fetch. The lock of the stripe guards it until done is closed.
type waiter struct {
	call *call
	cost float64
	gone bool          // whether its caller has left
	done chan struct{} // closed when there is an answer

	got   view // what is known of the bucket with the answer
	apart bool // whether the call is to go to the database by itself
	err   error
}

// errExited is what calls get whose fetch was ended by runtime.Goexit in a hook of the program.
var errExited = errors.New("the goroutine that takes ahead has exited")

// answer gives the waiter its answer, unless it left.
func (w *waiter) answer() {
	if !w.gone {
		close(w.done)
	}
}

// toDatabase has the calls go to the database by themselves.
func toDatabase(waiters []*waiter) {
	for _, w := range waiters {
		w.apart = true
		w.answer()
	}
}

// fail answers the calls with an error.
func fail(waiters []*waiter, err error) {
	for _, w := range waiters {
		w.err = err
		w.answer()
	}
}

// await waits until the waiter has its answer, or its time is over.
func (p *prefetched) await(ctx context.Context, s *holdingStripe, h *holding, w *waiter) error {
	l := p.limiter
	defer p.waiting.Add(-1)
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	select {
	case <-w.done:
	case <-ctx.Done():
		if p.left(s, h, w) {
			return ctx.Err()
		}
	}
	switch {
	case w.err != nil:
		return w.err
	case w.apart:
		err := w.call.send(ctx, l)
		p.noteAnswer(w.call, 0, err)
		return err
	}
	w.call.given(w.got)
	return nil
}

// left notes that the caller of w has left, and reports whether it has no answer. A fetch that nobody waits for any more is
// cancelled, as it may wait for a row that somebody holds.
func (p *prefetched) left(s *holdingStripe, h *holding, w *waiter) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-w.done: // it was answered this moment
		return false
	default:
	}
	w.gone = true
	for _, other := range h.waiters {
		if !other.gone {
			return true
		}
	}
	if h.leave != nil {
		h.leave()
	}
	return true
}

// enter reports whether a call may wait for the fetch of the holding, and one may begin where none is under way. The stripe is
// locked.
func (p *prefetched) enter(h *holding) bool {
	if p.waiting.Add(1) > int64(p.limiter.config.MaxWaiting) || !h.fetching && !p.start() {
		p.waiting.Add(-1)
		return false
	}
	return true
}

// fetchFor begins a fetch that nobody waits for, when the last call for the bucket found too little and more are expected.
func (p *prefetched) fetchFor(ctx context.Context, c *call, i int) {
	a, s := &c.Asks[i], p.stripe(&c.Asks[i].Key)
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.of[a.Key]
	if h == nil || h.fetching || h.policy != a.Policy || h.has(a.Cost, p.now()) || h.pace.Ahead(h.row.Value, 0, h.cost) == 0 || !p.start() {
		return
	}
	p.beginFetch(ctx, s, h)
}

// beginFetch begins a fetch, with the values of the context. The stripe is locked, and start was called.
func (p *prefetched) beginFetch(ctx context.Context, s *holdingStripe, h *holding) {
	h.fetching = true
	ctx = context.WithoutCancel(ctx)
	go func() {
		more := true
		defer func() {
			if more { // a hook of the program has ended the goroutine
				s.mu.Lock()
				h.stop()
				s.mu.Unlock()
			}
			p.end()
		}()
		for isFirst := true; more; isFirst = false {
			more = p.fetch(ctx, s, h, isFirst)
		}
	}()
}

// fetch takes from the row what the calls that wait cost and some ahead, in one statement, and reports whether another is to
// follow, for those that came meanwhile.
func (p *prefetched) fetch(ctx context.Context, s *holdingStripe, h *holding, isFirst bool) (more bool) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s.mu.Lock()
	waiters, cost, ahead := h.next(p.now(), isFirst)
	if ahead == 0 {
		h.stop()
		s.mu.Unlock()
		return false
	}
	h.leave = cancel
	var c store.Call
	c.Verb, c.Asks = verbTake, []bucket.Ask{{Key: h.key, Terms: *h.terms, Cost: cost + ahead, Mode: h.terms.Mode()}}
	s.mu.Unlock()

	sent, err := p.now(), errExited
	defer func() { // whatever ends it, those who wait go on
		if failure := recover(); failure != nil {
			err = fmt.Errorf("a hook panicked: %v", failure)
		}
		more = p.fetched(ctx, s, h, &c, waiters, sent, err)
	}()
	err = p.limiter.batcher.Do(ctx, c.Queueable())
	return false
}

// next returns the calls that the next fetch is for, what they cost together, and how much is taken ahead beside that.
func (h *holding) next(now time.Duration, isFirst bool) (waiters []*waiter, cost, ahead float64) {
	waiting := h.waiters[:0]
	for _, w := range h.waiters {
		if !w.gone {
			waiting = append(waiting, w)
			cost += w.cost
		}
	}
	h.waiters = waiting
	switch {
	case len(waiting) > 0 && !isFirst:
		ahead = h.ahead(now, cost, waiting[0].cost)
	case len(waiting) > 0 || isFirst:
		ahead = h.pace.Ahead(h.row.Value, cost, h.cost)
	}
	return waiting, cost, ahead
}

// stop ends the fetches of the holding, and sends those who wait to the database.
func (h *holding) stop() {
	waiters := h.waiters
	h.fetching, h.waiters, h.leave = false, nil, nil
	toDatabase(waiters)
}

// fetched gives out what a fetch for the waiters has taken, and keeps the rest. It reports whether another is to follow.
func (p *prefetched) fetched(ctx context.Context, s *holdingStripe, h *holding, c *store.Call, waiters []*waiter, sent time.Duration, err error) (more bool) {
	s.mu.Lock()
	h.leave = nil
	late := h.waiters[len(waiters):]
	h.waiters = append([]*waiter(nil), late...)
	switch {
	case err != nil:
		fail(waiters, err)
	case !c.Answers[0].Allowed:
		h.note(&c.Answers[0], p.now())
		h.pace.Stop()
		rest := h.giveUp()
		s.mu.Unlock()
		p.giveBack(ctx, rest, 0) // so that it is there for those who ask for it now
		s.mu.Lock()
		toDatabase(waiters)
		h.stop()
		s.mu.Unlock()
		return false
	default:
		p.give(s, h, c, waiters, sent)
	}
	more = len(h.waiters) > 0
	if !more {
		h.stop()
	}
	p.unlock(s)
	if err == nil {
		p.limiter.reports.invalidate(c.Asks)
	}
	return more
}

// give gives out what a fetch has taken: what is left of the one before first, then to those that the fetch was for, and to
// those that came later, as long as there is enough.
func (p *prefetched) give(s *holdingStripe, h *holding, c *store.Call, waiters []*waiter, sent time.Duration) {
	a, r, now := &c.Asks[0], &c.Answers[0], p.now()
	before, rest, isValid := h.kept, 0.0, now < h.ends
	if isValid {
		rest = max(before.Left, 0)
	}
	h.note(r, now)
	h.kept = bucket.Ahead{Taken: a.Cost, Left: a.Cost, TS: r.State.TS}
	keeps := time.Duration(a.Terms.KeptFor(r.Now)) * time.Microsecond
	h.sent, h.ends, h.usedAt = sent, sent+keeps, now
	for _, w := range waiters {
		old := min(rest, w.cost)
		if w.gone { // what it was to get is kept
			continue
		}
		rest -= old
		h.kept.Left = max(h.kept.Left-(w.cost-old), 0)
		w.got = view{terms: &a.Terms, row: r.State, at: r.Now, kept: h.kept}
		w.answer()
	}
	if isValid {
		before.Left = rest
	}
	p.orphanOf(h.key, *h.terms, before)
	s.events = append(s.events, Prefetched{Limit: h.key.Name, Taken: h.kept.Left})
	for len(h.waiters) > 0 && (h.waiters[0].gone || h.has(h.waiters[0].cost, now)) {
		w := h.waiters[0]
		h.waiters = h.waiters[1:]
		if w.gone {
			continue
		}
		h.spend(w.cost, now)
		w.got = p.view(h, now)
		w.answer()
	}
	if a.Terms.Era != h.terms.Era { // what is kept is of another policy
		p.orphanOf(h.key, a.Terms, h.kept)
		h.kept, h.known = bucket.Ahead{}, false
	}
}
