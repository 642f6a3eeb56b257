package preflight

import (
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/internal/engine/store"
)

const (
	// leaveEvery is the least time from one search for connections to a read-only server to the next. A server that is
	// read-only for good is then not connected to anew for each call that fails.
	leaveEvery = time.Second
	// leaveAtMost bounds the connections that one search closes.
	leaveAtMost = 16
	// leaveTimeout bounds a search: the caller waits for it with his error.
	leaveTimeout = time.Second
)

// Leaving is when a limiter last searched its pool for connections to a read-only server.
type Leaving struct {
	mu   sync.Mutex
	last time.Time
}

// Leave closes read-only connections of the pool. The pool then opens others: to the new primary, if the connection
// string asks for a primary. It takes connections as every call does, by beginning a transaction, and stops at the
// first that may write: it only closes idle connections. A search that comes too soon after another does nothing.
func (w *Leaving) Leave(ctx context.Context, pool *pgxpool.Pool) {
	if !w.mu.TryLock() {
		return
	}
	defer w.mu.Unlock()
	if !w.last.IsZero() && time.Since(w.last) < leaveEvery {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, leaveTimeout)
	defer cancel()
	for closed := 0; closed < leaveAtMost && closeReadOnly(ctx, pool); closed++ {
	}
	w.last = time.Now()
}

// closeReadOnly closes one connection of the pool if nothing can be written on it, and reports whether it did.
func closeReadOnly(ctx context.Context, pool *pgxpool.Pool) bool {
	tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}) // a standby has no SERIALIZABLE
	if err != nil {
		return false
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), store.EndTimeout)
		defer cancel()
		_ = tx.Rollback(ctx)
	}()
	var readOnly string
	if err := tx.QueryRow(ctx, `SHOW transaction_read_only`).Scan(&readOnly); err != nil || readOnly != "on" {
		return false
	}
	_ = tx.Conn().Close(ctx) // a closed connection does not go back into the pool
	return true
}
