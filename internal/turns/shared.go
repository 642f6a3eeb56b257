package turns

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// sharedTurn is the turn at one bucket, among the transactions of all processes. A transaction has one turn, and waits for it
// before it holds anything else in the server, so that it is part of no deadlock. The queue of this process holds transactions that
// wait in the server, not running ones, so that the next one already waits when the turn ends.
type sharedTurn struct {
	tx   *turnTx // the attempt's
	in   *queue  // that the transaction is in; nil: none
	head bool    // whether it may wait in the server
	came bool    // whether its turn came
}

func (s *sharedTurn) begin(tx pgx.Tx) pgx.Tx {
	s.tx, s.came = &turnTx{Tx: tx}, false
	return s.tx
}

// willWait reports whether the next attempt waits for its turn. An attempt that had its turn and
// lost nevertheless met transactions that do not take turns there.
func (s *sharedTurn) willWait(t *Ticket) bool { return !s.came && t.queues.anyHot(t.asked) }

// again waits for the turn at one of the buckets.
func (s *sharedTurn) again(ctx context.Context, t *Ticket) {
	if next := s.join(ctx, t); next != nil {
		_ = s.tx.await(ctx, next) // it goes on without; on a connection that is lost the next statement fails
	}
}

// enter waits for the turn with the statement that comes next, if that is the first of the transaction.
func (s *sharedTurn) enter(ctx context.Context, t *Ticket, _ []bucket.Key) {
	if s.in == nil && !s.tx.used {
		s.tx.next = s.join(ctx, t)
	}
}

// join waits in this process, and returns the turn to wait for in the server. It is nil if transactions do not queue for the buckets of
// the call, and if the wait took too long.
func (s *sharedTurn) join(ctx context.Context, t *Ticket) *turn {
	k, q := t.queues.joinHottest(t.asked)
	if q == nil {
		return nil
	}
	began := time.Now()
	s.in, s.head = q, q.wait(ctx, t.queues.Wait)
	if !s.head {
		t.waited += time.Since(began)
		return nil
	}
	return &turn{
		lock: lockOf(t.queues.schema, k),
		wait: t.queues.Wait - time.Since(began),
		over: func(came, waited bool) {
			t.waited += time.Since(began)
			s.came = came
			if waited {
				t.queues.extend(q)
			}
			s.behead()
		},
	}
}

// behead lets the next one of this process wait in the server.
func (s *sharedTurn) behead() {
	if s.head {
		s.head = false
		s.in.lock <- struct{}{}
	}
}

// leave leaves the queue. The turn has ended with the transaction.
func (s *sharedTurn) leave(t *Ticket) {
	if s.in != nil {
		s.behead()
		t.queues.leave(s.in, false)
		s.in = nil
	}
}

// joinHottest joins the queue for one of the buckets, and returns nil if transactions queue for none of them. It picks among the buckets
// with the most conflicts, or with half as many: the first in the order of locking. So transactions on
// the same few buckets take turns at the same bucket, in any order of their calls.
func (qs *Queues) joinHottest(buckets []bucket.Key) (chosen bucket.Key, in *queue) {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	most := 0
	for _, k := range buckets {
		if q := qs.of[k]; qs.isHot(q) {
			most = max(most, q.met)
		}
	}
	for _, k := range buckets {
		if q := qs.of[k]; qs.isHot(q) && 2*q.met >= most && (in == nil || k.Compare(chosen) < 0) {
			chosen, in = k, q
		}
	}
	if in != nil {
		in.users++
	}
	return chosen, in
}

// anyHot reports whether transactions queue for one of the buckets.
func (qs *Queues) anyHot(buckets []bucket.Key) bool {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	return slices.ContainsFunc(buckets, func(k bucket.Key) bool { return qs.isHot(qs.of[k]) })
}

// extend has transactions go on to queue: they have met transactions of other processes.
func (qs *Queues) extend(q *queue) {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	q.hotUntil = qs.Now().Add(queueMemory)
}
