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
	wait  time.Duration // for which a transaction queues
}

// queue is the queue for one bucket: whoever receives from lock is at its head.
type queue struct {
	lock     chan struct{}
	users    int       // transactions in it, at its head included
	met      int       // conflicts since it was made
	hotUntil time.Time // when it may be forgotten
}

func newQueues() *queues {
	return &queues{of: make(map[bucket.Key]*queue), now: time.Now, limit: maxQueues, wait: queueWait}
}

// conflict notes that transactions met at the buckets, so that the next ones queue.
func (qs *queues) conflict(buckets []bucket.Key) {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	for _, k := range buckets {
		if q := qs.get(k); q != nil {
			q.met++
			q.hotUntil = qs.now().Add(queueMemory)
		}
	}
}

// get returns the queue for k, a new one when there is none, and nil when there are too many.
func (qs *queues) get(k bucket.Key) *queue {
	if q := qs.of[k]; q != nil {
		return q
	}
	if len(qs.of) >= qs.limit {
		qs.sweep()
		if len(qs.of) >= qs.limit {
			return nil
		}
	}
	q := &queue{lock: make(chan struct{}, 1)}
	q.lock <- struct{}{}
	qs.of[k] = q
	return q
}

// sweep forgets the queues nobody is in and nobody has met at lately.
func (qs *queues) sweep() {
	now := qs.now()
	for k, q := range qs.of {
		if q.users == 0 && now.After(q.hotUntil) {
			delete(qs.of, k)
		}
	}
}

// join returns the queue for k when transactions queue for it now, and nil otherwise.
func (qs *queues) join(k bucket.Key) *queue {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	q := qs.of[k]
	if q == nil {
		return nil
	}
	if q.users == 0 && qs.now().After(q.hotUntil) {
		delete(qs.of, k)
		return nil
	}
	q.users++
	return q
}

// leave gives up the place in the queue, and when held its head.
func (qs *queues) leave(q *queue, held bool) {
	qs.mu.Lock()
	q.users--
	if q.users > 0 {
		q.hotUntil = qs.now().Add(queueMemory)
	}
	qs.mu.Unlock()
	if held {
		q.lock <- struct{}{}
	}
}

// wait waits until the head of the queue is free, for at most d, and reports whether it has been taken.
func (q *queue) wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-q.lock:
		return true
	default:
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-q.lock:
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	return false
}

// tickets are what the transactions of one call of InTx hold in the queues. A ticket is kept no longer than the
// transaction, and taken by one that has begun: whoever is at the head of a queue and still has to wait for a
// connection waits for those behind it, who have them all.
type tickets struct {
	queues *queues
	asked  []bucket.Key // the buckets the last attempt asked for
	named  []bucket.Key // those of WithQueue
	held   map[bucket.Key]*queue
	queued bool          // whether the last attempt held a ticket
	waited time.Duration // for the tickets of the attempt
	shared *sharedTicket // in place of those in held, with Config.SharedQueues; else nil
}

// takeAgain queues, before the first statement of an attempt, for the buckets the one before it asked for, in one
// order.
func (t *tickets) takeAgain(ctx context.Context) {
	if t.shared != nil {
		t.shared.takeAgain(ctx, t)
		t.asked = t.asked[:0]
		return
	}
	slices.SortFunc(t.asked, bucket.Key.Compare)
	deadline := time.Now().Add(t.queues.wait)
	for _, k := range t.asked {
		t.take(ctx, k, time.Until(deadline))
	}
	t.asked = t.asked[:0]
}

// Enter queues for the buckets that an open transaction is about to take from. Only its first call waits:
// later ones hold row locks that the head of the queue may be waiting for.
func (t *tickets) Enter(ctx context.Context, rows []bucket.Ask) {
	if t.shared != nil {
		t.shared.enter(ctx, t, rows)
		return
	}
	deadline := time.Now()
	if len(t.asked) == 0 {
		deadline = deadline.Add(t.queues.wait)
	}
	for i := range rows {
		k := rows[i].Key
		if !slices.Contains(t.asked, k) {
			t.asked = append(t.asked, k)
			t.take(ctx, k, time.Until(deadline))
		}
	}
}

// take takes the head of the queue for k, if transactions queue for it, and waits for that for at most d.
func (t *tickets) take(ctx context.Context, k bucket.Key, d time.Duration) {
	if t.held[k] != nil {
		return
	}
	q := t.queues.join(k)
	if q == nil {
		return
	}
	began := time.Now()
	taken := q.wait(ctx, d)
	t.waited += time.Since(began)
	if !taken {
		t.queues.leave(q, false)
		return
	}
	t.held[k] = q
}

// release leaves all queues.
func (t *tickets) release() {
	if t.shared != nil {
		t.shared.release(t)
		return
	}
	t.queued = len(t.held) > 0
	for _, q := range t.held {
		t.queues.leave(q, true)
	}
	clear(t.held)
}
