// Package turns makes transactions of a process, or of all processes, take turns at the buckets where they conflicted.
package turns

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

const (
	// queueMemory is how long after its last conflict a bucket's transactions still queue.
	queueMemory = time.Second
	// queueWait is how long a transaction queues. It equals deadlock_timeout, after which Postgres looks for a deadlock, because the
	// first in the queue may wait for a row that the transaction holds. It then goes on, and Postgres settles the conflict.
	queueWait = time.Second
	// maxQueues bounds the buckets that are queued for at once. Others just conflict and retry.
	maxQueues = 4096
)

// Queues serialize the transactions of this process on one bucket once they have conflicted. Retries at SERIALIZABLE alone would
// start at the same moment, and all but one would fail.
type Queues struct {
	Now  func() time.Time // the clock
	Wait time.Duration    // for which a transaction queues

	schema string // transactions of all processes on this schema take turns; "": only of this process
	limit  int
	mu     sync.Mutex
	of     map[bucket.Key]*queue
}

// queue is the queue for one bucket: a goroutine that receives from lock is at its head.
type queue struct {
	lock     chan struct{}
	users    int       // transactions in it, at its head included
	met      int       // conflicts since it was made
	hotUntil time.Time // when it may be forgotten
}

// New returns queues for the transactions of this process, or with a schema, for the transactions of all processes on it.
func New(schema string) *Queues {
	return &Queues{of: make(map[bucket.Key]*queue), Now: time.Now, limit: maxQueues, Wait: queueWait, schema: schema}
}

// Conflict notes that transactions met at the buckets, so that the next ones queue.
func (qs *Queues) Conflict(buckets []bucket.Key) {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	for _, k := range buckets {
		if q := qs.get(k); q != nil {
			q.met++
			q.hotUntil = qs.Now().Add(queueMemory)
		}
	}
}

// get returns the queue for k, a new one when there is none, and nil when there are too many.
func (qs *Queues) get(k bucket.Key) *queue {
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

// sweep forgets the empty queues without recent conflicts.
func (qs *Queues) sweep() {
	for k, q := range qs.of {
		if !qs.isHot(q) {
			delete(qs.of, k)
		}
	}
}

// isHot reports whether transactions queue.
func (qs *Queues) isHot(q *queue) bool {
	return q != nil && (q.users > 0 || !qs.Now().After(q.hotUntil))
}

// join returns the queue for k when transactions queue for it now, and nil otherwise.
func (qs *Queues) join(k bucket.Key) *queue {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	q := qs.of[k]
	if !qs.isHot(q) {
		delete(qs.of, k)
		return nil
	}
	q.users++
	return q
}

// leave gives up the place in the queue, and when held its head.
func (qs *Queues) leave(q *queue, held bool) {
	qs.mu.Lock()
	q.users--
	if q.users > 0 {
		q.hotUntil = qs.Now().Add(queueMemory)
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

// Ticket holds the places of one call of InTx in the queues. It is held no longer than the transaction, and only a transaction that
// has begun takes it. Otherwise the head of a queue could wait for a connection while the transactions behind it have all
// connections.
type Ticket struct {
	queues *Queues
	asked  []bucket.Key  // the buckets the last attempt asked for
	named  []bucket.Key  // the buckets that all attempts queue for
	waited time.Duration // of the attempt
	place  place
	own    heads // what place mostly is: one allocation
}

// place is what a transaction holds: the heads of queues of this process, or a turn among all processes.
type place interface {
	begin(tx pgx.Tx) pgx.Tx                               // returns the transaction of an attempt as its calls have it
	again(ctx context.Context, t *Ticket)                 // waits before the first statement of an attempt for the buckets of the last one
	enter(ctx context.Context, t *Ticket, k []bucket.Key) // waits for buckets that an open transaction is about to take from
	leave(t *Ticket)
	willWait(t *Ticket) bool // whether the next attempt waits, so that it needs no pause before
}

// Ticket returns a ticket. Transactions queue for the named buckets from now on.
func (qs *Queues) Ticket(named []bucket.Key) *Ticket {
	qs.Conflict(named)
	t := &Ticket{queues: qs, named: named}
	if t.place = &t.own; qs.schema != "" {
		t.place = &sharedTurn{}
	}
	return t
}

// Begin returns the transaction of an attempt as its calls have it.
func (t *Ticket) Begin(tx pgx.Tx) pgx.Tx {
	if len(t.asked) == 0 {
		t.asked = append(t.asked, t.named...)
	}
	return t.place.begin(tx)
}

// Again queues, before the first statement of an attempt, for the buckets the one before it asked for.
func (t *Ticket) Again(ctx context.Context) {
	if len(t.asked) > 0 {
		t.place.again(ctx, t)
	}
	t.asked = t.asked[:0]
}

// Enter queues for the buckets that an open transaction is about to take from.
func (t *Ticket) Enter(ctx context.Context, rows []bucket.Ask) {
	first := len(t.asked)
	for i := range rows {
		if k := rows[i].Key; !slices.Contains(t.asked, k) {
			t.asked = append(t.asked, k)
		}
	}
	t.place.enter(ctx, t, t.asked[first:])
}

// Release gives the place up.
func (t *Ticket) Release() { t.place.leave(t) }

// Conflict notes that an attempt conflicted at its buckets. It reports whether the next attempt waits for its turn, so that it
// needs no pause before.
func (t *Ticket) Conflict() (willWait bool) {
	t.queues.Conflict(t.asked)
	return t.place.willWait(t)
}

// Waited returns how long an attempt has waited, once.
func (t *Ticket) Waited() (waited time.Duration) {
	waited, t.waited = t.waited, 0
	return waited
}

// heads are the heads of queues of this process.
type heads struct {
	held   map[bucket.Key]*queue
	queued bool // whether the last attempt held one
}

func (h *heads) begin(tx pgx.Tx) pgx.Tx  { return tx }
func (h *heads) willWait(_ *Ticket) bool { return h.queued }

// again queues for the buckets in one order.
func (h *heads) again(ctx context.Context, t *Ticket) {
	slices.SortFunc(t.asked, bucket.Key.Compare)
	h.take(ctx, t, t.asked, time.Now().Add(t.queues.Wait))
}

// enter queues. Only its first call waits: later ones hold row locks that the head of the queue may be waiting for.
func (h *heads) enter(ctx context.Context, t *Ticket, keys []bucket.Key) {
	deadline := time.Now()
	if len(keys) == len(t.asked) {
		deadline = deadline.Add(t.queues.Wait)
	}
	h.take(ctx, t, keys, deadline)
}

// take takes the heads of the queues for keys, if transactions queue for them, and waits for that until the deadline.
func (h *heads) take(ctx context.Context, t *Ticket, keys []bucket.Key, deadline time.Time) {
	for _, k := range keys {
		if h.held[k] != nil {
			continue
		}
		q := t.queues.join(k)
		if q == nil {
			continue
		}
		began := time.Now()
		taken := q.wait(ctx, time.Until(deadline))
		t.waited += time.Since(began)
		if !taken {
			t.queues.leave(q, false)
			continue
		}
		if h.held == nil {
			h.held = make(map[bucket.Key]*queue)
		}
		h.held[k] = q
	}
}

// leave leaves all queues.
func (h *heads) leave(t *Ticket) {
	h.queued = len(h.held) > 0
	for _, q := range h.held {
		t.queues.leave(q, true)
	}
	clear(h.held)
}
