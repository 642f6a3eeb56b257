package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/pgerr"
)

// leaveReadOnly closes idle connections of the pool to a read-only server, if err came from one. It leaves other pools than
// pgx's, and single connections of the caller, unchanged.
func leaveReadOnly(ctx context.Context, l *Limiter, err error) {
	state := pgerr.Code(err)
	if (state == pgerr.ReadOnly || state == codeNotSupported) && !l.isConnection && isOfPgx(l.pool) {
		l.leaving.Leave(ctx, l.pool)
	}
}

// isOfPgx reports whether the type of the pool is pgx's own, whose BeginTx only begins a transaction.
func isOfPgx(pool Pool) bool {
	t := reflect.TypeOf(pool)
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	path := reflect.TypeFor[pgx.Conn]().PkgPath()
	return t.PkgPath() == path || strings.HasPrefix(t.PkgPath(), path+"/")
}

// explained returns explain for an error of a call of l. Outside the caller's transaction it also leaves a read-only server. If
// a table is missing, the next call compares the fingerprint again, because new tables can have another secret.
//
// If ctx has ended, explained adds its error to the server's query_canceled, because pgx returns only the server's error if the
// pool sends cancel requests (pgconn.CancelRequestContextWatcherHandler).
func (l *Limiter) explained(ctx context.Context, err error) error {
	if ended := ctx.Err(); ended != nil && pgerr.Code(err) == pgerr.QueryCanceled && !errors.Is(err, ended) {
		err = fmt.Errorf("%w: %w", ended, err)
	}
	inTx := l.pool == nil
	if !inTx {
		leaveReadOnly(ctx, l, err)
	}
	err = explain(err, l.config.Schema, inTx)
	if errors.Is(err, ErrNotMigrated) {
		l.gate.Forget()
	}
	return err
}
