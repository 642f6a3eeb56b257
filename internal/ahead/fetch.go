package ahead

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/batch"
	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// waiter is a call that waits for a fetch. The lock of the stripe guards it until done is closed.
type waiter struct {
	cost float64
	gone bool          // whether its caller has left
	done chan struct{} // closed when there is an answer

	got View // the state of the bucket with the answer
	err error
}

var (
	// errExited is what calls get whose fetch was ended by runtime.Goexit in a hook of the program.
	errExited = errors.New("the goroutine that prefetches has exited")
	// errApart has a call go to the database by itself.
	errApart = errors.New("nothing was prefetched")
)

// answer gives the calls an error, or tokens if there is none. Some may have left.
func answer(waiters []*waiter, err error) {
	for _, w := range waiters {
		if w.err = err; !w.gone {
			close(w.done)
		}
	}
}

// await waits until the waiter has its answer, or its time is over.
func (k *Keeper) await(ctx context.Context, s *stripe, h *holding, w *waiter) error {
	defer k.waiting.Add(-1)
	ctx, cancel := batch.Bounded(ctx, k.options.Timeout)
	defer cancel()
	select {
	case <-w.done:
	case <-ctx.Done():
		if k.left(s, h, w) {
			return ctx.Err()
		}
	}
	return w.err
}

// left notes that the caller of w has left, and reports whether it has no answer. A fetch without waiting callers is
// cancelled, because it may wait for a row that another transaction holds.
func (k *Keeper) left(s *stripe, h *holding, w *waiter) bool {
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

// enter reports whether a call may wait for the fetch of the holding, or begin one if none is in progress. The stripe is locked.
func (k *Keeper) enter(h *holding) bool {
	if k.waiting.Add(1) > int64(k.options.MaxWaiting) || !h.fetching && !k.start() {
		k.waiting.Add(-1)
		return false
	}
	return true
}

// beginFetch begins a fetch, with the values of the context. The stripe is locked, and start was called.
func (k *Keeper) beginFetch(ctx context.Context, s *stripe, h *holding) {
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
			k.end()
		}()
		for isFirst := true; more; isFirst = false {
			more = k.fetch(ctx, s, h, isFirst)
		}
	}()
}

// fetch takes the costs of the waiting calls from the row, and prefetches some tokens, in one statement. It reports whether another fetch
// must follow, for calls that came meanwhile.
func (k *Keeper) fetch(ctx context.Context, s *stripe, h *holding, isFirst bool) (more bool) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s.mu.Lock()
	waiters, cost, ahead := h.next(k.now(), isFirst)
	if ahead == 0 {
		h.stop()
		s.mu.Unlock()
		return false
	}
	h.leave = cancel
	var c store.Call
	c.Verb, c.Asks = "take", []bucket.Ask{{Key: h.key, Terms: *h.terms, Policy: h.policy, Cost: cost + ahead, Mode: h.terms.Eras.Mode(h.terms.Era)}}
	s.mu.Unlock()

	sent, err := k.now(), errExited
	defer func() { // also after a panic, waiting calls go on
		if failure := recover(); failure != nil {
			err = fmt.Errorf("a hook panicked: %v", failure)
		}
		more = k.fetched(ctx, s, h, &c, waiters, sent, err)
	}()
	err = k.owner.Fetch(ctx, &c)
	return false
}

// next returns the calls of the next fetch, their total cost, and how many tokens to prefetch in addition.
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
		ahead = h.pace.ahead(h.row.Value, cost, h.cost)
	}
	return waiting, cost, ahead
}

// stop ends the fetches of the holding, and sends waiting calls to the database.
func (h *holding) stop() {
	waiters := h.waiters
	h.fetching, h.waiters, h.leave = false, nil, nil
	answer(waiters, errApart)
}

// fetched gives out what a fetch for the waiters has taken, and keeps the rest. It reports whether another is to follow.
func (k *Keeper) fetched(ctx context.Context, s *stripe, h *holding, c *store.Call, waiters []*waiter, sent time.Duration, err error) (more bool) {
	s.mu.Lock()
	h.leave = nil
	late := h.waiters[len(waiters):]
	h.waiters = append([]*waiter(nil), late...)
	switch {
	case err != nil:
		answer(waiters, err)
	case !c.Answers[0].Allowed:
		h.note(&c.Answers[0], k.now())
		h.pace = 0
		rest := h.giveUp()
		s.mu.Unlock()
		k.giveBack(ctx, rest, 0) // for the calls that go to the database now
		s.mu.Lock()
		answer(waiters, errApart)
		h.stop()
		s.mu.Unlock()
		return false
	default:
		k.give(s, h, c, waiters, sent)
	}
	more = len(h.waiters) > 0
	if !more {
		h.stop()
	}
	k.unlock(s)
	return more
}

// give gives out the rest of the fetch before, and then the tokens of this fetch: first to the calls of the fetch, then to later
// calls, while there are enough.
func (k *Keeper) give(s *stripe, h *holding, c *store.Call, waiters []*waiter, sent time.Duration) {
	a, r, now := &c.Asks[0], &c.Answers[0], k.now()
	before, rest, isValid := h.kept, 0.0, now < h.ends
	if isValid {
		rest = max(before.Left, 0)
	}
	h.note(r, now)
	h.kept = bucket.Ahead{Taken: a.Cost, Left: a.Cost, TS: r.State.TS}
	keeps := time.Duration(bucket.KeptFor(&a.Terms, r.Now)) * time.Microsecond
	h.sent, h.ends, h.usedAt = sent, sent+keeps, now
	for _, w := range waiters {
		old := min(rest, w.cost)
		if w.gone { // its tokens are kept
			continue
		}
		rest -= old
		h.kept.Left = max(h.kept.Left-(w.cost-old), 0)
		w.got = View{terms: &a.Terms, row: r.State, at: r.Now, kept: h.kept}
		close(w.done)
	}
	if isValid {
		before.Left = rest
	}
	k.orphan(h.key, *h.terms, before)
	s.events = append(s.events, Event{Limit: h.key.Name, Taken: h.kept.Left})
	for len(h.waiters) > 0 && (h.waiters[0].gone || h.has(h.waiters[0].cost, now)) {
		w := h.waiters[0]
		h.waiters = h.waiters[1:]
		if w.gone {
			continue
		}
		h.spend(w.cost, now)
		w.got = k.view(h, now)
		close(w.done)
	}
	if a.Terms.Era != h.terms.Era { // the kept tokens are of another policy
		k.orphan(h.key, a.Terms, h.kept)
		h.kept, h.known = bucket.Ahead{}, false
	}
}
