package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/store"
)

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
func (l *Limiter) explained(ctx context.Context, err error) error {
	if ended := ctx.Err(); ended != nil && store.SQLState(err) == codeQueryCanceled && !errors.Is(err, ended) {
		err = fmt.Errorf("%w: %w", ended, err)
	}
	inTx := l.pool == nil
	if !inTx {
		l.leaveReadOnly(ctx, err)
	}
	err = explain(err, l.config.Schema, inTx)
	if errors.Is(err, ErrNotMigrated) {
		l.gate.Forget()
	}
	return err
}
