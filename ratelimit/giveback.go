package ratelimit

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

const (
	// sweeps is how often in a Prefetch one timer looks for tokens that are not used, from minSweep to maxSweep apart. They are
	// given back when none was used for idleSweeps of these.
	sweeps             = 8
	idleSweeps         = 2
	minSweep, maxSweep = 5 * time.Millisecond, time.Second
	// givingBack is how many statements give back at once.
	givingBack = 4
	// returnWait is how long a sweep waits for a locked row. It tries again a maxSweep later.
	returnWait = 50 * time.Millisecond
)

// leftover is what is left of a holding that is no more.
type leftover struct {
	key   bucket.Key
	terms bucket.Terms
	kept  bucket.Ahead

	notBefore time.Duration // when a sweep retries after a lock timeout; 0: at once
}

// giveUp ends what is kept, and returns what is left of it.
func (h *holding) giveUp() (all []leftover) {
	if h.kept.Left > 0 {
		all = append(all, leftover{key: h.key, terms: *h.terms, kept: h.kept})
	}
	h.kept = bucket.Ahead{}
	return all
}

// orphan ends what is kept, and has what is left of it given back later.
func (p *prefetched) orphan(h *holding) {
	p.orphanOf(h.key, *h.terms, h.kept)
	h.kept = bucket.Ahead{}
}

// orphanOf has what is left of what was kept under these terms given back later.
func (p *prefetched) orphanOf(k bucket.Key, t bucket.Terms, kept bucket.Ahead) {
	if kept.Left <= 0 {
		return
	}
	p.mu.Lock()
	p.orphans = append(p.orphans, leftover{key: k, terms: t, kept: kept})
	p.mu.Unlock()
	p.arm(t.Prefetch)
}

// start reports whether something may begin that Close is to wait for.
func (p *prefetched) start() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.idle != nil {
		return false
	}
	p.running++
	return true
}

// end ends what start began.
func (p *prefetched) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running--
	if p.idle != nil && p.running == 0 {
		close(p.idle)
	}
}

// arm sees to it that tokens that are not used are given back, as long as there are holdings.
func (p *prefetched) arm(prefetch int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.idle != nil || p.timer != nil && p.shortest <= prefetch {
		return
	}
	if p.timer != nil {
		p.timer.Stop()
	}
	p.shortest = prefetch
	p.timer = time.AfterFunc(sweepEvery(prefetch), p.sweep)
}

func sweepEvery(prefetch int64) time.Duration {
	return min(max(time.Duration(prefetch)*time.Microsecond/sweeps, minSweep), maxSweep)
}

// sweep gives back what is not used, and forgets holdings of which nothing is kept.
func (p *prefetched) sweep() {
	if !p.start() {
		return
	}
	defer p.end()
	left, shortest := p.dueOrphans()
	for i := range p.stripes {
		left = p.sweepStripe(&p.stripes[i], left, &shortest)
	}
	if shortest > 0 {
		p.arm(shortest) // before it gives back, which may take long
	}
	p.giveBack(context.Background(), left, returnWait)
}

// heldPrefetch is the Prefetch by which the next sweep is a maxSweep later.
const heldPrefetch = int64(sweeps * maxSweep / time.Microsecond)

// dueOrphans returns the orphans that it is time to give back, and the Prefetch by which the others are; 0 if there are none.
func (p *prefetched) dueOrphans() (due []leftover, shortest int64) {
	now := p.now()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.timer = nil
	later := p.orphans[:0:0]
	for _, one := range p.orphans {
		if one.notBefore > now {
			later = append(later, one)
			shortest = heldPrefetch
		} else {
			due = append(due, one)
		}
	}
	p.orphans = later
	return due, shortest
}

// retry has a later sweep give one back, because its row is locked.
func (p *prefetched) retry(one leftover) {
	one.notBefore = p.now() + maxSweep
	p.mu.Lock()
	p.orphans = append(p.orphans, one)
	p.mu.Unlock()
	p.arm(heldPrefetch)
}

func (p *prefetched) sweepStripe(s *holdingStripe, left []leftover, shortest *int64) []leftover {
	now := p.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for k, h := range s.of {
		prefetch := time.Duration(h.terms.Prefetch) * time.Microsecond
		if !h.fetching {
			if h.isLeft(now, prefetch) {
				h.pace.Halve()
				left = append(left, h.giveUp()...)
			}
			if h.kept.Left <= 0 && now-h.usedAt > 2*prefetch {
				delete(s.of, k)
				p.count.Add(-1)
				continue
			}
		}
		if *shortest == 0 || h.terms.Prefetch < *shortest {
			*shortest = h.terms.Prefetch
		}
	}
	return left
}

// isLeft reports whether what is kept is to be given back: its time is over, or none of it is being used, or most of it
// is still there after half of the time. The sooner, the more of it is of use to others.
func (h *holding) isLeft(now, prefetch time.Duration) bool {
	unused := h.kept.Left > h.kept.Taken-h.kept.Left
	return h.kept.Left > 0 && (now >= h.ends || now-h.usedAt >= prefetch*idleSweeps/sweeps || unused && now-h.sent >= prefetch/2)
}

// giveBack gives back to the rows what is left, as far as the promise allows, and waits for that: for each row up to most, after
// which a sweep tries again; a most of 0 waits until ctx ends.
func (p *prefetched) giveBack(ctx context.Context, left []leftover, most time.Duration) {
	if len(left) < 2 {
		for i := range left {
			p.giveBackOne(ctx, &left[i], most)
		}
		return
	}
	var workers sync.WaitGroup
	next := make(chan *leftover)
	for range min(givingBack, len(left)) {
		workers.Go(func() {
			for one := range next {
				p.giveBackOne(ctx, one, most)
			}
		})
	}
	for i := range left {
		next <- &left[i]
	}
	close(next)
	workers.Wait()
}

// giveBackOne gives one back. What could not be given back is lost, unless the row was locked for longer than most.
func (p *prefetched) giveBackOne(ctx context.Context, one *leftover, most time.Duration) {
	l := p.limiter
	if most > 0 { // a sweep, beside which others may run
		p.slots <- struct{}{}
		defer func() { <-p.slots }()
	}
	event := Prefetched{Limit: one.key.Name, Lost: one.kept.Left}
	defer func() {
		if failure := recover(); failure != nil { // of a hook of the program: it must not end the process
			l.reports.failed(ctx, Failed{Verb: "return", Limit: one.key.Name, Err: fmt.Errorf("ratelimit: return %q: a hook panicked: %v", one.key.Name, failure)}, l.reports.began())
		}
		p.tell(event)
	}()
	began := l.reports.began()
	bounded, cancel := l.bounded(ctx)
	defer cancel()
	terms, kept := one.terms.Returning(one.kept)
	given, err := p.giveTo(bounded, one.key, terms, kept, most)
	l.reports.invalidate([]bucket.Ask{{Key: one.key}})
	if most > 0 && store.IsLockTimeout(err) {
		event.Lost = 0
		p.retry(*one)
		return
	}
	if err != nil {
		err = during(fmt.Sprintf("return %q", one.key.Name), l.explained(ctx, err, false))
		l.reports.failed(ctx, Failed{Verb: "return", Limit: one.key.Name, Err: err}, began)
		return
	}
	event.Returned, event.Lost = given, one.kept.Left-given
}

// tell tells the observer.
func (p *prefetched) tell(event Prefetched) {
	if p.limiter.reports.observer != nil && event != (Prefetched{Limit: event.Limit}) {
		p.limiter.reports.tell(context.Background(), event)
	}
}

// beforeChange gives back what is kept of the buckets that a call changes whatever they hold. In a transaction that may hold
// their rows, that is done beside it.
func (p *prefetched) beforeChange(ctx context.Context, l *Limiter, asks []bucket.Ask) {
	if p == nil || p.count.Load() == 0 {
		return
	}
	var left []leftover
	for i := range asks {
		s := p.stripe(&asks[i].Key)
		s.mu.Lock()
		if h := s.of[asks[i].Key]; h != nil && !h.fetching {
			if l.pool == nil {
				p.orphan(h)
			} else {
				left = append(left, h.giveUp()...)
			}
		}
		s.mu.Unlock()
	}
	p.giveBack(ctx, left, 0)
}

// close gives back all that is kept, and waits for that, or until ctx ends. No fetch succeeds any more.
func (p *prefetched) close(ctx context.Context) error {
	p.mu.Lock()
	if p.idle == nil {
		p.idle = make(chan struct{})
		if p.running == 0 {
			close(p.idle)
		}
	}
	if p.timer != nil {
		p.timer.Stop()
	}
	p.mu.Unlock()
	select {
	case <-p.idle: // also where ctx is over
	default:
		select {
		case <-p.idle:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	p.mu.Lock()
	left := p.orphans
	p.orphans = nil
	p.mu.Unlock()
	for i := range p.stripes {
		s := &p.stripes[i]
		s.mu.Lock()
		for _, h := range s.of {
			left = append(left, h.giveUp()...)
		}
		p.count.Add(-int64(len(s.of)))
		s.of = nil
		s.mu.Unlock()
	}
	if len(left) == 0 {
		return nil
	}
	p.giveBack(ctx, left, 0)
	return ctx.Err()
}
