// Package txqueue makes transactions take turns at the buckets where they conflicted: the transactions of a process,
// and if these still conflict, those of all processes.
package txqueue

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
)

const (
	// queueMemory is how long after its last conflict a bucket's transactions still queue.
	queueMemory = time.Second
	// queueWait is how long a transaction queues. It equals deadlock_timeout, after which Postgres looks for a deadlock,
	// because the first in the queue may wait for a row that the transaction holds. It then goes on, and Postgres settles
	// the conflict.
	queueWait = time.Second
	// maxQueues bounds the buckets that are queued for at once. Others just conflict and retry.
	maxQueues = 4096
)

// Queues serialize the transactions on one bucket once they have conflicted. Retries at SERIALIZABLE alone would start
// at the same moment, and all but one would fail. At first the transactions of this process queue, in its memory. If
// the first in the queue conflicts nevertheless, it has met another process. From then on it also waits for an advisory
// lock, before its first statement.
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
	lock        chan struct{}
	users       int       // transactions in it, at its head included
	hotUntil    time.Time // when it may be forgotten
	sharedUntil time.Time // until when its head also takes turns with other processes
}

// New returns queues for the transactions of this process, or with a schema, for the transactions of all processes on
// it.
func New(schema string) *Queues {
	return &Queues{of: make(map[bucket.Key]*queue), Now: time.Now, limit: maxQueues, Wait: queueWait, schema: schema}
}

// Conflict notes that transactions met at the buckets, so that the next ones queue: with shared also those of other
// processes.
func (qs *Queues) Conflict(shared bool, buckets ...bucket.Key) {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	for _, k := range buckets {
		if q := qs.get(k); q != nil {
			qs.extend(q, shared)
		}
	}
}

// extend has transactions queue from now on.
func (qs *Queues) extend(q *queue, shared bool) {
	q.hotUntil = qs.Now().Add(queueMemory)
	if shared && qs.schema != "" {
		q.sharedUntil = q.hotUntil
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
		qs.extend(q, false)
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

// Ticket holds the places of one call of InTx in the queues. It is held no longer than the transaction, and only a
// transaction that has begun takes it. Otherwise the head of a queue could wait for a connection while the transactions
// behind it have all connections.
type Ticket struct {
	queues *Queues
	asked  []bucket.Key // the buckets the last attempt asked for
	named  []bucket.Key // the buckets that all attempts queue for
	waited time.Duration
	tx     *turnTx // the attempt's; nil: it queues only with this process
	heads  []head  // that the attempt has or, when it has ended, had
}

type head struct {
	of     bucket.Key
	queue  *queue
	shared bool // whether no transaction of another process is at the head of its queue for the bucket
}

// Ticket returns a ticket. Transactions queue for the named buckets from now on.
func (qs *Queues) Ticket(named []bucket.Key) *Ticket {
	qs.Conflict(false, named...)
	return &Ticket{queues: qs, named: named, asked: slices.Clone(named)}
}

// Begin returns the transaction of an attempt as its calls have it. Before its first statement it queues for the
// buckets that the attempt before asked for.
func (t *Ticket) Begin(ctx context.Context, tx pgx.Tx) pgx.Tx {
	if t.queues.schema != "" {
		t.tx = &turnTx{Tx: tx}
		tx = t.tx
	}
	t.heads = t.heads[:0]
	if len(t.asked) == 0 {
		t.asked = append(t.asked, t.named...)
	}
	slices.SortFunc(t.asked, bucket.Key.Compare)
	t.take(ctx, t.asked, time.Now().Add(t.queues.Wait))
	t.asked = t.asked[:0]
	return tx
}

// Enter queues for the buckets that an open transaction is about to take from. Only its first call waits: later ones
// hold row locks that the head of the queue may be waiting for.
func (t *Ticket) Enter(ctx context.Context, rows []bucket.Ask) {
	first := len(t.asked)
	for i := range rows {
		if k := rows[i].Key; !slices.Contains(t.asked, k) {
			t.asked = append(t.asked, k)
		}
	}
	deadline := time.Now()
	if first == 0 {
		deadline = deadline.Add(t.queues.Wait)
	}
	t.take(ctx, t.asked[first:], deadline)
}

// take takes the heads of the queues for keys, if transactions queue for them, and waits for that until the deadline.
func (t *Ticket) take(ctx context.Context, keys []bucket.Key, deadline time.Time) {
	before := len(t.heads)
	for _, k := range keys {
		if slices.ContainsFunc(t.heads, func(h head) bool { return h.of == k }) {
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
		t.heads = append(t.heads, head{of: k, queue: q})
	}
	if len(t.heads) > before && t.tx != nil && !t.tx.used {
		t.share(ctx, time.Until(deadline))
	}
}

// share waits in the server until the transaction is the only one of all processes at the heads of its shared queues.
func (t *Ticket) share(ctx context.Context, most time.Duration) {
	if deadline, bounded := ctx.Deadline(); bounded {
		most = min(most, time.Until(deadline))
	}
	if most <= 0 {
		return
	}
	qs := t.queues
	var locks []int64
	qs.mu.Lock()
	for i := range t.heads {
		h := &t.heads[i]
		if h.shared = !qs.Now().After(h.queue.sharedUntil); h.shared {
			locks = append(locks, lockOf(qs.schema, h.of))
		}
	}
	qs.mu.Unlock()
	if len(locks) == 0 {
		return
	}
	slices.Sort(locks)
	began := time.Now()
	came, waited := t.tx.await(ctx, locks, most)
	t.waited += time.Since(began)
	qs.mu.Lock()
	defer qs.mu.Unlock()
	for i := range t.heads {
		if h := &t.heads[i]; h.shared {
			h.shared = came
			if waited {
				qs.extend(h.queue, true)
			}
		}
	}
}

// Release gives the places up.
func (t *Ticket) Release() {
	for i := range t.heads {
		t.queues.leave(t.heads[i].queue, true)
	}
}

// Conflict notes that an attempt conflicted at its buckets. It reports whether the next attempt waits for its turn, so
// that it needs no pause before. An attempt that lost although all others queued has met transactions that do not.
func (t *Ticket) Conflict() (willWait bool) {
	t.queues.Conflict(false, t.asked...)
	for i := range t.heads {
		if h := &t.heads[i]; !h.shared {
			t.queues.Conflict(true, h.of)
			willWait = true
		}
	}
	return willWait
}

// Waited returns how long an attempt has waited, once.
func (t *Ticket) Waited() (waited time.Duration) {
	waited, t.waited = t.waited, 0
	return waited
}
