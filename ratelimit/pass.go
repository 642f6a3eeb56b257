package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/gate"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// pass returns an error when a call must not be sent: a single connection is in a transaction, the keys are stored under another secret,
// or statements would get lost on the way to the server. A call that is not keyed names keys as they are stored, or none.
func (l *Limiter) pass(ctx context.Context, verb string, keyed, looks bool) error {
	if l.isConnection {
		if err := notInTx(l.pool); err != nil {
			return err
		}
	}
	if l.gate.IsOpen(&l.session, l.pool == nil, keyed) {
		return nil
	}
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	return l.gate.Pass(ctx, &l.session, gate.Call{Verb: verb, InTx: l.pool == nil, Keyed: keyed, Looks: looks})
}

// leaveReadOnly closes connections of the pool to a read-only server, if err says that there was one. A pool that is not of pgx is left
// as it is, and so is a single connection, which is the caller's.
func (l *Limiter) leaveReadOnly(ctx context.Context, err error) {
	state := store.SQLState(err)
	if (state == codeReadOnly || state == codeNotSupported) && !l.isConnection && isOfPgx(l.pool) {
		l.leaving.Leave(ctx, l.pool)
	}
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
		l.gate.Forget()
	}
	return err
}
