package ratelimit

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

const (
	// queueMemory is how long after its last conflict a bucket's transactions still queue.
	queueMemory = time.Second
	// queueWait is how long a transaction queues: as long as Postgres waits until it looks for a deadlock
	// (deadlock_timeout), because what it holds may be what the first in the queue waits for. It then goes
	// on, and Postgres settles it.
	queueWait = time.Second
	// maxQueues bounds the buckets that are queued for at once. Others just conflict and retry.
	maxQueues = 4096
)

// queues make the transactions of this process that want one bucket go one after the other once they have
// conflicted, as retries at SERIALIZABLE do not: they start at the same moment and all but one fail.
type queues struct {
	mu    sync.Mutex
	of    map[bucket.Key]*queue
	now   func() time.Time
	limit int
}

// queue is the queue for one bucket: whoever takes the token out of turn is at its head.
type queue struct {
	turn     chan struct{}
	users    int       // transactions in it, at its head included
	hotUntil time.Time // when it may be forgotten
}

func newQueues() *queues {
	return &queues{of: make(map[bucket.Key]*queue), now: time.Now, limit: maxQueues}
}

// conflict notes that transactions met at the buckets, so that the next ones queue.
func (q *queues) conflict(buckets []bucket.Key) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, k := range buckets {
		if at := q.get(k); at != nil {
			at.hotUntil = q.now().Add(queueMemory)
		}
	}
}

// get returns the queue for w, a new one when there is none, and nil when there are too many.
func (q *queues) get(k bucket.Key) *queue {
	if at := q.of[k]; at != nil {
		return at
	}
	if len(q.of) >= q.limit {
		q.sweep()
		if len(q.of) >= q.limit {
			return nil
		}
	}
	at := &queue{turn: make(chan struct{}, 1)}
	at.turn <- struct{}{}
	q.of[k] = at
	return at
}

// sweep forgets the queues nobody is in and nobody has met at lately.
func (q *queues) sweep() {
	now := q.now()
	for k, at := range q.of {
		if at.users == 0 && now.After(at.hotUntil) {
			delete(q.of, k)
		}
	}
}

// join returns the queue for w when transactions queue for it now, and nil otherwise.
func (q *queues) join(k bucket.Key) *queue {
	q.mu.Lock()
	defer q.mu.Unlock()
	at := q.of[k]
	if at == nil {
		return nil
	}
	if at.users == 0 && q.now().After(at.hotUntil) {
		delete(q.of, k)
		return nil
	}
	at.users++
	return at
}

// leave gives up the place in the queue, and when held its head.
func (q *queues) leave(at *queue, held bool) {
	q.mu.Lock()
	at.users--
	if at.users > 0 {
		at.hotUntil = q.now().Add(queueMemory)
	}
	q.mu.Unlock()
	if held {
		at.turn <- struct{}{}
	}
}

// wait waits until the head of the queue is free, for at most d, and reports whether it has been taken.
func (at *queue) wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-at.turn:
		return true
	default:
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-at.turn:
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	return false
}

// places are what the transactions of one call of InTx hold in the queues. A place is kept no longer than the
// transaction, and taken by one that has begun: whoever is at the head of a queue and still has to wait for a
// connection waits for those behind it, who have them all.
type places struct {
	queues  *queues
	touched []bucket.Key // the buckets the last attempt asked for
	held    map[bucket.Key]*queue
	queued  bool          // whether the last attempt held a place
	waited  time.Duration // for the places of the attempt
}

// hold queues, before the first statement of an attempt, for the buckets the one before it asked for, in one
// order.
func (p *places) hold(ctx context.Context) {
	slices.SortFunc(p.touched, bucket.Key.Compare)
	deadline := time.Now().Add(queueWait)
	p.waited = 0
	for _, k := range p.touched {
		p.take(ctx, k, time.Until(deadline))
	}
	p.touched = p.touched[:0]
}

// enter queues for the buckets that an open transaction is about to take from. Only its first call waits:
// later ones hold row locks that the head of the queue may be waiting for.
func (p *places) enter(ctx context.Context, buckets []ask) {
	deadline := time.Now()
	if len(p.touched) == 0 {
		deadline = deadline.Add(queueWait)
	}
	for i := range buckets {
		k := buckets[i].rowKey()
		if !slices.Contains(p.touched, k) {
			p.touched = append(p.touched, k)
			p.take(ctx, k, time.Until(deadline))
		}
	}
}

// take takes the head of the queue for w, if transactions queue for it, and waits for that for at most d.
func (p *places) take(ctx context.Context, k bucket.Key, d time.Duration) {
	if p.held[k] != nil {
		return
	}
	at := p.queues.join(k)
	if at == nil {
		return
	}
	began := time.Now()
	taken := at.wait(ctx, d)
	p.waited += time.Since(began)
	if !taken {
		p.queues.leave(at, false)
		return
	}
	p.held[k] = at
}

// release leaves all queues.
func (p *places) release() {
	p.queued = len(p.held) > 0
	for _, at := range p.held {
		p.queues.leave(at, true)
	}
	clear(p.held)
}
