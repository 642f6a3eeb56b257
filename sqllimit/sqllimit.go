// Package sqllimit takes the limits of package ratelimit in transactions of database/sql, and of what stands on it, as sqlx,
// GORM, bun and ent.
//
//	limiter, err := sqllimit.New(db, ratelimit.Config{})
//
//	err = sqllimit.InTx(ctx, limiter, func(tx *sql.Tx, limits *ratelimit.Limiter) error {
//		if err := limits.Require(ctx, SendMessage.For(userID), FreeTrials.Global()); err != nil {
//			return err // limit exceeded: the transaction rolls back, and neither limit is charged
//		}
//		_, err := tx.ExecContext(ctx, `INSERT INTO messages (author, body) VALUES ($1, $2)`, userID, body)
//		return err
//	})
//
// What New and WithTx return is a *[ratelimit.Limiter], with all of its calls, answers, errors and promises: no call is written
// twice. The drivers are pgx's stdlib and lib/pq.
//
//   - With stdlib each call is sent on the connection of pgx itself, in as many round trips as with pgx. In a transaction a tracer of pgx is told,
//     around each call, of a statement that fails: it is how the connection is found, and is never sent.
//   - lib/pq has no pipeline. Its statements go one after the other, and one with parameters takes two round trips, or one with
//     binary_parameters=yes. Where calls outside of a transaction go together, New begins a transaction for them. Numbers come as
//     text, so leave extra_float_digits at 1, as it is, or more.
//   - Another driver, or a stdlib that a tracing driver hides, is used as lib/pq is, and has to give errors with a method SQLState.
//
// A driver's own error is found by errors.As, beside the *pgconn.PgError that the core looks for.
//
// Config.SharedQueues is for pools of pgx only. So are migrations.Up and rules.NewSet, each of which a program that has no
// other use for one gives a pool of its own; the command ratelimit, and the goose tool, make the tables, too.
//
// Unit tests need no server: OpenSQL of package ratelimittest returns a *sql.DB in memory that New, WithTx and InTx take.
package sqllimit

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/arg"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Tx is what a call needs of a transaction. *sql.Tx has it, and a *sql.Conn on which one was begun. Those of libraries that
// rewrite what they are given, as bun.Tx does, hold a *sql.Tx to pass in their place.
type Tx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// WithTx returns a Limiter whose calls are part of tx, as [ratelimit.Limiter.WithTx] does for a transaction of pgx: they
// commit with it and are undone with it, they never retry, and they use no other connection. The limiter may be one on a pool of pgx as
// well as one of New. When a transaction lost against another, ratelimit.IsRetryable says so of the error.
//
// Calls of the Limiter come one after the other, as what is sent on a transaction does: not from several goroutines at once.
//
// A *sql.DB is no transaction: calls of a Limiter that was bound to one return ratelimit.ErrInvalidConfig, and send nothing.
func WithTx(limiter *ratelimit.Limiter, tx Tx) *ratelimit.Limiter {
	if arg.IsNil(tx) {
		return limiter.WithTx(nil)
	}
	return limiter.WithTx(&callersTx{conn: conn{run: runnerOf(tx)}, of: tx})
}

// New returns a Limiter whose calls run on db, each in a transaction of its own, as ratelimit.New does on a pool of pgx. It makes no
// connection.
func New(db *sql.DB, config ratelimit.Config) (*ratelimit.Limiter, error) {
	if db == nil {
		return nil, fmt.Errorf("%w: the database is nil; pass what sql.Open returned", ratelimit.ErrInvalidConfig)
	}
	return ratelimit.New(newPool(db), config)
}

// InTx is [ratelimit.Limiter.InTx] with a *sql.Tx, for a limiter of New: it runs fn in a SERIALIZABLE transaction, and again, on a new one,
// when that conflicts with another at a statement or at COMMIT; so fn must return the errors of its statements. limits are
// the calls of the limiter as part of tx.
//
// An error of fn rolls back and is returned as it is. Otherwise it is ratelimit.ErrContended, ratelimit.ErrCommitUnknown or the context's,
// as InTx of a Limiter says. The transaction does not end with ctx of its own accord: its COMMIT runs to its end. SQL of fn that ends the
// transaction is detected with the driver of pgx only.
func InTx(ctx context.Context, limiter *ratelimit.Limiter, fn func(tx *sql.Tx, limits *ratelimit.Limiter) error) error {
	if fn == nil {
		return limiter.InTx(ctx, nil)
	}
	return limiter.InTx(ctx, func(owned pgx.Tx) error {
		wrapped, _ := owned.(interface{ Unwrap() pgx.Tx })
		if wrapped == nil {
			return errNotOfNew()
		}
		begun, ok := wrapped.Unwrap().(*ownTx)
		if !ok {
			return errNotOfNew()
		}
		err := fn(begun.tx, limiter.WithTx(owned))
		if begun.isDone(ctx) {
			_ = owned.Commit(ctx) // tells the Limiter that fn has ended it
		}
		return err
	})
}

func errNotOfNew() error {
	return fmt.Errorf("%w: InTx of package sqllimit needs a Limiter that sqllimit.New returned", ratelimit.ErrInvalidConfig)
}
