package waitlist

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// queue has the callers of this process that wait for a key, the first one first. While it has any, a goroutine asks
// for them.
type queue struct {
	key     string // in its stored form
	waiting []*waiter
	wake    chan struct{} // has an element after a release
}

// waiter is a caller that waits.
type waiter struct {
	ctx      context.Context //nolint:containedctx // of a call that waits
	key      string
	requests []ratelimit.Request
	slots    bool                            // whether it waits for a slot, and not for tokens alone
	acquire  func() (ratelimit.Lease, error) // has the decision only, if it waits for tokens
	done     chan answer
	asked    bool // whether a call for it is under way, which answers it unless it is refused and may wait on
}

type answer struct {
	lease ratelimit.Lease
	err   error
}

// waits reports whether callers of this process wait for the key.
func (s *List) waits(key string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.queues[key] != nil
}

// join puts a caller at the end of the queue.
func (s *List) join(w *waiter) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	q := s.queues[w.key]
	if q == nil {
		q = &queue{key: w.key, wake: make(chan struct{}, 1)}
		s.queues[w.key] = q
		go s.serve(context.Background(), q)
	}
	if len(q.waiting) >= s.config.MaxWaiting {
		return fmt.Errorf("%w for %q (%d)", ErrTooManyWaiting, s.limit.Name(), len(q.waiting))
	}
	q.waiting = append(q.waiting, w)
	return nil
}

// leave takes a caller that gives up out of the queue. It reports false if the caller gets an answer.
func (s *List) leave(w *waiter) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	q := s.queues[w.key]
	if q == nil {
		return false
	}
	i := slices.Index(q.waiting, w)
	if i < 0 || w.asked {
		return false
	}
	q.waiting = slices.Delete(q.waiting, i, i+1)
	if i == 0 {
		q.signal() // for the next one
	}
	return true
}

// signal ends a pause of the goroutine of the queue.
func (q *queue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// first returns the first caller, and marks it as asked for if ask is set. Without callers it forgets the queue, and
// returns nil.
func (s *List) first(q *queue, ask bool) *waiter {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(q.waiting) == 0 {
		delete(s.queues, q.key)
		return nil
	}
	w := q.waiting[0]
	w.asked = ask
	return w
}

// answer gives the first caller its answer. A caller that was refused stays first and waits on, unless its context has
// ended: then it may have tried to leave while it was asked for.
func (s *List) answer(q *queue, w *waiter, a answer) (answered bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w.asked = false
	if a.err == nil && !a.lease.Allowed {
		if a.err = w.ctx.Err(); a.err == nil {
			return false
		}
	}
	q.waiting = q.waiting[1:]
	w.done <- a
	return true
}

// fail gives all callers of the queue an error, and forgets the queue: a caller that comes later begins another.
func (s *List) fail(q *queue, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range q.waiting {
		w.done <- answer{err: err}
	}
	delete(s.queues, q.key)
}

// ask acquires for a caller if a check finds enough, also of the other requests. A refusal by a check is not counted: a
// caller that waits is not turned away.
func (s *List) ask(w *waiter, others ...ratelimit.Request) (ratelimit.Lease, error) {
	d, err := s.limiter.Check(w.ctx, slices.Concat(w.requests, others)...)
	if err != nil || !d.Allowed {
		return ratelimit.Lease{Decision: d}, err
	}
	return w.acquire()
}

// serve asks for the callers of a queue, one after the other, until none is left.
func (s *List) serve(ctx context.Context, q *queue) {
	p := &place{s: s, key: q.key}
	defer s.signal(q.key)            // a queue that began meanwhile is behind this place
	defer func() { _ = recover() }() // nobody waits for giveUp; the place ends by itself
	defer p.giveUp(ctx)
	defer func() {
		if failure := recover(); failure != nil { // of a hook of the program, such as a tracer of pgx
			s.fail(q, fmt.Errorf("waitlist: wait for %q: a hook panicked: %v", s.limit.Name(), failure))
		}
	}()
	for s.first(q, false) != nil {
		ahead, others, err := p.find(ctx)
		if err != nil {
			s.fail(q, err)
			return
		}
		if ahead > 0 { // those further back look less often, so that a long line costs little more than a short one
			q.pause(s.config.Poll * time.Duration(ahead))
			continue
		}
		w := s.first(q, true)
		if w == nil {
			return
		}
		lease, err := s.ask(w)
		answered := s.answer(q, w, answer{lease, err})
		switch {
		case !answered && w.slots:
			q.pause(min(s.config.Poll, lease.RetryAfter))
		case !answered:
			q.pause(lease.RetryAfter)
		case others:
			p.giveUp(ctx) // to the end of the line
		}
	}
}

// pause waits for d, or until a release is heard of.
func (q *queue) pause(d time.Duration) {
	select {
	case <-time.After(d):
	case <-q.wake:
	}
}

// place is the place of this process in the line for a key.
type place struct {
	s       *List
	key     string
	lease   ratelimit.Lease
	held    context.Context //nolint:containedctx // of the lease; nil: the process is not in the line
	release func()
}

// find returns how many processes are ahead in the line, and whether others are behind. It takes a place if this
// process has none.
func (p *place) find(ctx context.Context) (ahead int, others bool, err error) {
	if p.held != nil && p.held.Err() != nil { // it was lost
		p.giveUp(ctx)
	}
	if p.held == nil {
		lease, err := p.s.limiter.Acquire(ctx, p.s.line.ForStoredKey(p.key))
		if err != nil {
			return 0, false, err
		}
		if !lease.Allowed {
			return 0, false, fmt.Errorf("%w: %d processes wait for %q", ErrTooManyWaiting, maxPlaces, p.s.limit.Name())
		}
		p.lease = lease
		p.held, p.release = p.s.limiter.KeepAlive(ctx, lease)
	}
	value, err := p.s.limiter.Value(ctx, p.s.line.ForStoredKey(p.key))
	if err != nil {
		return 0, false, err
	}
	leases := value.Leases()
	for _, l := range leases {
		if l.Fence < p.lease.Fence {
			ahead++
		}
	}
	return ahead, len(leases) > 1, nil
}

// giveUp leaves the line.
func (p *place) giveUp(ctx context.Context) {
	if p.held == nil {
		return
	}
	p.release()
	p.held = nil
	p.s.tell(ctx, p.key)
}
