package memory

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// The SQLSTATE values of what goes wrong here.
const (
	codeDeadlockDetected = "40P01"
	codeLockNotAvailable = "55P03"
	codeInFailedTx       = "25P02"
)

// failure returns the error that Postgres has for the same.
func failure(code, message string) error {
	return &pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: code, Message: message}
}

// lock is a row that a transaction has locked, and the waiting transactions, in the order of arrival.
type lock struct {
	holder *Tx
	queue  []*waiter
}

// waiter is a transaction that waits for a lock. It has it once ready is closed.
type waiter struct {
	tx    *Tx
	ready chan struct{}
}

// acquire locks a row for the transaction, and waits for the transaction that has it. db.mu is held, but not while it
// waits.
func (tx *Tx) acquire(ctx context.Context, row any) error {
	db := tx.DB
	l := db.locks[row]
	switch {
	case l == nil:
		db.locks[row] = &lock{holder: tx}
		tx.held = append(tx.held, row)
		return nil
	case l.holder == tx:
		return nil
	case l.waitsFor(tx):
		return failure(codeDeadlockDetected, "deadlock detected")
	}
	w := &waiter{tx, make(chan struct{})}
	l.queue = append(l.queue, w)
	tx.waiting = l
	db.mu.Unlock()
	err := tx.await(ctx, w)
	db.mu.Lock()
	tx.waiting = nil
	if l.holder == tx { // also if that came together with the end of the wait
		tx.held = append(tx.held, row)
	} else {
		l.queue = slices.DeleteFunc(l.queue, func(other *waiter) bool { return other == w })
	}
	return err
}

func (l *lock) waitsFor(tx *Tx) bool {
	for l != nil && l.holder != tx {
		l = l.holder.waiting
	}
	return l != nil
}

// await waits until the lock is there, ctx ends, or the wait has been long enough.
func (tx *Tx) await(ctx context.Context, w *waiter) error {
	var expired <-chan time.Time
	if tx.mostWait > 0 {
		timer := time.NewTimer(tx.mostWait)
		defer timer.Stop()
		expired = timer.C
	}
	select {
	case <-w.ready:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for a transaction that holds the row: %w", ctx.Err())
	case <-expired:
		return failure(codeLockNotAvailable, "canceling statement due to lock timeout")
	}
}

// release gives the locks from the n-th on to the waiting transactions. db.mu is held.
func (tx *Tx) release(n int) {
	for _, row := range tx.held[n:] {
		l := tx.locks[row]
		if len(l.queue) == 0 {
			delete(tx.locks, row)
			continue
		}
		next := l.queue[0]
		l.holder, l.queue, next.tx.waiting = next.tx, l.queue[1:], nil
		close(next.ready)
	}
	tx.held = tx.held[:n]
}
