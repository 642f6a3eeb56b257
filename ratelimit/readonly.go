package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/store"
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

// leaving is when a Limiter last searched its pool for connections to a read-only server.
type leaving struct {
	mu   sync.Mutex
	last time.Time
}

// begin reports whether a search may begin now. Its end is to unlock mu.
func (w *leaving) begin() bool {
	if !w.mu.TryLock() {
		return false
	}
	if !w.last.IsZero() && time.Since(w.last) < leaveEvery {
		w.mu.Unlock()
		return false
	}
	return true
}

// leaveReadOnly closes connections of the pool on which nothing can be written, where err says that there was one, so that the
// pool makes others: to the new primary, when the connection string asks for one. It takes connections as every
// call does, by beginning a transaction, and stops at the first that may write: no connection that somebody else uses is
// touched. A pool that is not of pgx is left as it is, and so is a single connection, which is the caller's.
func (l *Limiter) leaveReadOnly(ctx context.Context, err error) {
	switch store.SQLState(err) {
	default:
		return
	case codeReadOnly, codeNotSupported:
	}
	if l.isConnection || !isOfPgx(l.pool) || !l.leaving.begin() {
		return
	}
	defer l.leaving.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, leaveTimeout)
	defer cancel()
	for closed := 0; closed < leaveAtMost && closeReadOnly(ctx, l.pool); closed++ {
	}
	l.leaving.last = time.Now()
}

// closeReadOnly closes one connection of the pool if nothing can be written on it, and reports whether it did.
func closeReadOnly(ctx context.Context, pool Pool) bool {
	tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}) // a standby has no SERIALIZABLE
	if err != nil {
		return false
	}
	defer rollback(ctx, tx)
	var readOnly string
	if err := tx.QueryRow(ctx, `SHOW transaction_read_only`).Scan(&readOnly); err != nil || readOnly != "on" {
		return false
	}
	_ = tx.Conn().Close(ctx) // what is closed does not go back into the pool
	return true
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

// explained is explain for an error of a call of l. Outside of the caller's transaction it leaves a read-only server. Where a table is
// missing, the next call compares the fingerprint again, because whoever makes the tables anew may have another secret.
//
// If ctx has ended, explained adds its error to the server's query_canceled: pgx returns only the latter if the pool sends cancel
// requests (pgconn.CancelRequestContextWatcherHandler).
func (l *Limiter) explained(ctx context.Context, err error, inTx bool) error {
	if ended := ctx.Err(); ended != nil && store.SQLState(err) == codeQueryCanceled && !errors.Is(err, ended) {
		err = fmt.Errorf("%w: %w", ended, err)
	}
	if !inTx {
		l.leaveReadOnly(ctx, err)
	}
	err = explain(err, l.config.Schema, inTx)
	if errors.Is(err, ErrNotMigrated) {
		l.fingerprint.agreed.Store(false)
	}
	return err
}
