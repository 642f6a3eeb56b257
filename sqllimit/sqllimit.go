// Package sqllimit uses the limits of package ratelimit with database/sql, and with libraries on top of it, such as
// sqlx, GORM, bun and ent.
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
// New and WithTx return a *ratelimit.Limiter, with all of its calls and promises. The tested drivers are pgx's stdlib
// and lib/pq:
//
//   - With stdlib, calls use the connection of pgx, in as many round trips as with pgx. In a transaction a tracer of
//     pgx sees a failing statement around each call: the package finds the connection with it, and never sends it.
//   - lib/pq has no pipeline. It sends one statement after the other. A statement with parameters takes two round
//     trips, or one with binary_parameters=yes. Numbers are sent as text, so leave extra_float_digits at 1 or more.
//   - Another driver, or a stdlib that a tracing driver hides, is used like lib/pq. Its errors need a method SQLState.
//
// errors.As finds a driver's own error beside the *pgconn.PgError of the core. migrations.Up and rules.NewSet need
// a pool of pgx; the command ratelimit and the goose tool create the tables, too. InTx queues with transactions of its
// own process. For unit tests, OpenSQL of package ratelimittest returns a *sql.DB in memory.
package sqllimit

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/internal/arg"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Tx is a transaction: a *sql.Tx, or a *sql.Conn on which one was begun. For a transaction of a library that rewrites
// queries, such as bun.Tx, pass the *sql.Tx in it.
type Tx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// WithTx returns a Limiter whose calls are part of tx, as [ratelimit.Limiter.WithTx] does for pgx: they commit and roll
// back with it, never retry, and use no other connection. The limiter may be one of New, or one on a pgx pool. After a
// lost conflict, [ratelimit.IsRetryable] is true for the error.
//
// Don't call the Limiter on several goroutines at once. A *sql.DB isn't a transaction: calls on a Limiter for one
// return ratelimit.ErrInvalidConfig, and send nothing.
func WithTx(limiter *ratelimit.Limiter, tx Tx) *ratelimit.Limiter {
	if arg.IsNil(tx) {
		return limiter.WithTx(nil)
	}
	return limiter.WithTx(&callersTx{conn: conn{run: runnerOf(tx)}, of: tx})
}

// New returns a Limiter whose calls run on db, each in a transaction of its own, as ratelimit.New does on a pgx pool.
// It makes no connection.
func New(db *sql.DB, config ratelimit.Config) (*ratelimit.Limiter, error) {
	if db == nil {
		return nil, fmt.Errorf("%w: the database is nil; pass what sql.Open returned", ratelimit.ErrInvalidConfig)
	}
	return ratelimit.New(newPool(db), config)
}

// InTx is [ratelimit.Limiter.InTx] with a *sql.Tx, for a limiter of New. It runs fn in a SERIALIZABLE transaction, and
// again in a new one after a conflict at a statement or at COMMIT, so fn must return its statements' errors. limits
// makes the limiter's calls as part of tx.
//
// An error of fn rolls back and is returned unchanged. Other errors are ratelimit.ErrContended,
// ratelimit.ErrCommitUnknown or the context's error. A COMMIT continues after ctx has ended. InTx detects SQL of fn
// that ends the transaction only with pgx's driver.
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
			_ = owned.Commit(ctx) // shows the Limiter that fn has ended it
		}
		return err
	})
}

func errNotOfNew() error {
	return fmt.Errorf("%w: InTx of package sqllimit needs a Limiter that sqllimit.New returned",
		ratelimit.ErrInvalidConfig)
}
