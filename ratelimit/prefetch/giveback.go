package prefetch

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

const (
	// looks is how often in Terms.For a holding is looked at for unused tokens. They are returned when none was used for
	// idleLooks.
	looks, idleLooks = 8, 2
	minLook          = 5 * time.Millisecond
	// minReturn and maxReturn bound how long a return waits for its row.
	minReturn, maxReturn = 50 * time.Millisecond, time.Second
)

// leftover is the rest of a stock.
type leftover struct {
	request ratelimit.Request
	numbers ratelimit.Spec
	from    *stock
	left    float64
}

// giveUp ends the stock of the holding, and returns the rest of it.
func (h *holding) giveUp() (rest []leftover) {
	if h.left > 0 {
		rest = append(rest, leftover{h.request, h.numbers, h.from, h.left})
	}
	h.left = 0
	return rest
}

// isLeft reports whether to return the tokens: their time is over, no call uses them, or most of them are left after
// half of the time. The sooner, the more other processes can use.
func (h *holding) isLeft(now time.Duration) bool {
	if h.left <= 0 {
		return false
	}
	unused := h.left > h.from.taken-h.left
	return now >= h.from.ends || now-h.usedAt >= h.keep*idleLooks/looks || unused && now-h.from.sent >= h.keep/2
}

func (h *holding) lookEvery() time.Duration { return max(h.keep/looks, minLook) }

// look returns unused tokens, and forgets a holding that is not used.
func (l *Limiter) look(s *stripe, h *holding) {
	if !l.begin() {
		return
	}
	defer l.busy.Done()
	l.giveBack(context.Background(), l.unused(s, h))
}

func (l *Limiter) unused(s *stripe, h *holding) (rest []leftover) {
	now := l.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if h.fetch == nil && h.isLeft(now) {
		h.pace /= 2
		rest = h.giveUp()
	}
	if h.fetch == nil && h.left <= 0 && now-h.usedAt > 2*h.keep {
		delete(s.of, h.id)
		l.count.Add(-1)
		return rest
	}
	h.timer.Reset(h.lookEvery())
	return rest
}

// begin reports whether something may begin that Close waits for. It ends with busy.Done.
func (l *Limiter) begin() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.closed {
		l.busy.Add(1)
	}
	return !l.closed
}

func (l *Limiter) isOpen() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.closed
}

// giveBack returns what it can of the leftovers to their rows. The rest is lost.
func (l *Limiter) giveBack(ctx context.Context, rest []leftover) {
	var workers sync.WaitGroup
	for i := range rest {
		l.slots <- struct{}{}
		workers.Go(func() {
			defer func() { <-l.slots }()
			l.giveBackOne(ctx, &rest[i])
		})
	}
	workers.Wait()
}

func (l *Limiter) giveBackOne(ctx context.Context, one *leftover) {
	e := Event{Limit: one.request.Limit(), Lost: one.left}
	defer func() {
		_ = recover() // of a hook of the program
		l.report(e)
	}()
	tokens, within := one.returnable(l.now(), l.limiter.Resolve(one.request).Spec())
	if !(tokens >= minCost) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	if err := l.limiter.CreditTaken(ctx, one.from.at, one.request.Cost(tokens)); err == nil {
		e.Returned, e.Lost = tokens, one.left-tokens
	}
}

// returnable returns how many tokens may be returned to the row, and within which time: longer than minReturn if that
// costs no tokens. The row is then never fuller than without the Take of them:
//
//	min(left, taken - what arrives from the Take until then)
//
// After the Take it held no more than its capacity - taken. So without the part that is left it would have lost to the
// capacity no more than arrived - (taken - left). Without this bound, tokens that go back and forth between processes
// would be out of reach of the capacity, and pile up. Nothing arrives in a window, and CreditTaken returns nothing to
// the next one.
func (one *leftover) returnable(now time.Duration, policy ratelimit.Spec) (tokens float64, within time.Duration) {
	switch {
	case policy.Kind != one.numbers.Kind || now >= one.from.resets:
		return 0, 0
	case policy.Kind != ratelimit.KindTokenBucket:
		return one.left, maxReturn
	}
	rate := (1 + clockDrift) * max(policy.Rate/policy.Period.Seconds(), one.numbers.Rate/one.numbers.Period.Seconds())
	elapsed, used := now-one.from.sent, one.from.taken-one.left
	free := min(used/rate-elapsed.Seconds(), maxReturn.Seconds())
	within = max(time.Duration(free*float64(time.Second)), minReturn)
	return min(one.left, one.from.taken-rate*(elapsed+within).Seconds()), within
}

func (l *Limiter) report(e Event) {
	defer func() { _ = recover() }() // a panic in the background would end the process
	if l.config.Report != nil && e != (Event{Limit: e.Limit}) {
		l.config.Report(e)
	}
}

// Close returns all tokens that the process keeps, and waits for that, or until ctx ends. From then on Take calls the
// ratelimit.Limiter, so close this one first. Without Close, unused tokens return by themselves within For.
func (l *Limiter) Close(ctx context.Context) error {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	ended := make(chan struct{})
	go func() {
		l.busy.Wait()
		close(ended)
	}()
	select {
	case <-ended: // also where ctx is over
	case <-ctx.Done():
	}
	var rest []leftover
	for i := range l.stripes {
		s := &l.stripes[i]
		s.mu.Lock()
		for _, h := range s.of {
			h.timer.Stop()
			rest = append(rest, h.giveUp()...)
		}
		l.count.Add(-int64(len(s.of)))
		s.of = nil
		s.mu.Unlock()
	}
	l.giveBack(ctx, rest)
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("prefetch: close: %w", err)
	}
	return nil
}
