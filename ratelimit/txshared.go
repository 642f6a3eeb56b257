package ratelimit

import (
	"context"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// sharedTicket is what a transaction of InTx holds in place of tickets with Config.SharedQueues: the turn at one bucket,
// among the transactions of all processes. It is one, and waited for before anything else is held in the server, so that
// it is part of no deadlock. The queue of this process is for who waits in the server, and not for who is at work: the next
// one is there already when the turn is given up.
type sharedTicket struct {
	store *store.Store
	tx    *store.TurnTx // the attempt's
	in    *queue        // that the transaction is in; nil: none
	head  bool          // whether it is the one that may wait in the server
	came  bool          // whether its turn came
}

// isOfPgx reports whether the pool is one of pgx's own, whose BeginTx begins a transaction and runs nothing in it.
func isOfPgx(pool Pool) bool {
	t := reflect.TypeOf(pool)
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	path := reflect.TypeFor[pgx.Conn]().PkgPath()
	return t.PkgPath() == path || strings.HasPrefix(t.PkgPath(), path+"/")
}

// over returns the transaction of an attempt as its calls have it.
func (s *sharedTicket) over(tx pgx.Tx) pgx.Tx {
	s.tx, s.came = &store.TurnTx{Tx: tx}, false
	return s.tx
}

// willWait reports whether the next attempt waits for its turn, so that it needs no pause before. One that had its turn and
// lost nevertheless met transactions that do not take turns there.
func (t *tickets) willWait() bool {
	if t.shared == nil {
		return t.queued
	}
	return !t.shared.came && t.queues.isHot(t.asked)
}

// takeAgain waits, before the first statement of an attempt, for the turn at one of the buckets the one before asked for.
func (s *sharedTicket) takeAgain(ctx context.Context, t *tickets) {
	if turn, ok := s.join(ctx, t); ok {
		_ = s.tx.Await(ctx, turn) // it goes on without; on a connection that is lost the next statement fails
	}
}

// enter waits for the turn with the statement that comes next, if that is the first of the transaction.
func (s *sharedTicket) enter(ctx context.Context, t *tickets, rows []bucket.Ask) {
	for i := range rows {
		if k := rows[i].Key; !slices.Contains(t.asked, k) {
			t.asked = append(t.asked, k)
		}
	}
	if s.in != nil || !s.tx.IsFresh() {
		return
	}
	if turn, ok := s.join(ctx, t); ok {
		s.tx.AwaitWithNext(turn)
	}
}

// join waits in this process, and returns what to wait for in the server. It is false when transactions do not queue for what
// was asked for, and when it took too long.
func (s *sharedTicket) join(ctx context.Context, t *tickets) (store.Turn, bool) {
	k, q := t.queues.joinHottest(t.asked)
	if q == nil {
		return store.Turn{}, false
	}
	began := time.Now()
	s.in, s.head = q, q.wait(ctx, t.queues.wait)
	if !s.head {
		t.waited += time.Since(began)
		return store.Turn{}, false
	}
	return store.Turn{
		Lock: s.store.TurnLock(k),
		Wait: t.queues.wait - time.Since(began),
		Over: func(came, waited bool) {
			t.waited += time.Since(began)
			s.came = came
			if waited {
				t.queues.extend(q)
			}
			s.behead()
		},
	}, true
}

// behead lets the next one of this process wait in the server.
func (s *sharedTicket) behead() {
	if s.head {
		s.head = false
		s.in.lock <- struct{}{}
	}
}

// release leaves the queue. The turn has ended with the transaction.
func (s *sharedTicket) release(t *tickets) {
	if s.in != nil {
		s.behead()
		t.queues.leave(s.in, false)
		s.in = nil
	}
}

// joinHottest joins the queue for one of the buckets, and returns nil when transactions queue for none of them. It is one at
// which they have met most often, or half as often as that: of these the first in the order of locking, so that who wants
// the same few buckets takes turns at the same one, in whatever order he takes from them.
func (qs *queues) joinHottest(buckets []bucket.Key) (chosen bucket.Key, in *queue) {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	most := 0
	for _, k := range buckets {
		if q := qs.of[k]; q != nil && qs.hot(q) {
			most = max(most, q.met)
		}
	}
	for _, k := range buckets {
		if q := qs.of[k]; q != nil && qs.hot(q) && 2*q.met >= most && (in == nil || k.Compare(chosen) < 0) {
			chosen, in = k, q
		}
	}
	if in != nil {
		in.users++
	}
	return chosen, in
}

// isHot reports whether transactions queue for one of the buckets.
func (qs *queues) isHot(buckets []bucket.Key) bool {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	return slices.ContainsFunc(buckets, func(k bucket.Key) bool {
		q := qs.of[k]
		return q != nil && qs.hot(q)
	})
}

// extend has transactions go on to queue: they have met transactions of other processes.
func (qs *queues) extend(q *queue) {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	q.hotUntil = qs.now().Add(queueMemory)
}

// hot reports whether transactions queue.
func (qs *queues) hot(q *queue) bool { return q.users > 0 || !qs.now().After(q.hotUntil) }
