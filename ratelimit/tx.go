package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

const (
	// maxReconnects bounds the attempts that end because the connection, not the transaction, failed: a
	// server that is down should be reported soon.
	maxReconnects = 3

	// endTimeout bounds COMMIT and ROLLBACK, which do not run on the caller's context: a caller who hangs up
	// would turn a commit into one of unknown outcome.
	endTimeout = 5 * time.Second
)

// InTx runs fn in a SERIALIZABLE transaction and commits when fn returns nil. When the transaction conflicts
// with another, at a statement or at COMMIT, it is rolled back and fn is run again from the start, on a
// new transaction, after a random pause; so fn must not do what cannot be repeated, and must return the
// errors of its statements. Pass tx to [Limiter.WithTx] to take limits in it.
//
// Transactions of one Limiter that met at a bucket queue for it from then on, each before its first
// statement if that is the one that takes from the bucket. So take limits first: a transaction that read
// something before has its snapshot by then, and has to be run again after the wait.
//
// An error of fn rolls back and is returned as it is, a *LimitedError among them. InTx returns ErrContended
// when no attempt of Config.MaxAttempts got through, the context's error when it ended meanwhile, and
// ErrCommitUnknown when the connection failed after COMMIT was sent, which is never retried. On every
// other error nothing was written and nothing was taken, unless fn ended the transaction itself.
//
// Transactions that fn nests in tx, with tx.Begin or pgx.BeginFunc, are part of it, and WithTx takes them too: what an
// undone one took is back, and the Observer is not told of it. A ROLLBACK TO SAVEPOINT that fn executes as SQL gives back
// what was taken since as well, but the Observer is told of that nevertheless.
//
// COMMIT runs to its end even when ctx is cancelled during it, for up to five seconds.
func (l *Limiter) InTx(ctx context.Context, fn func(tx pgx.Tx) error) error {
	switch {
	case l == nil || l.pool == nil:
		return fmt.Errorf("%w: InTx begins a transaction and needs a Limiter that New returned, not one of WithTx", ErrInvalidConfig)
	case fn == nil:
		return fmt.Errorf("%w: InTx without a function", ErrInvalidRequest)
	case ctx.Err() != nil:
		return fmt.Errorf("ratelimit: transaction: %w", ctx.Err())
	}
	if err := l.idle(); err != nil {
		return err
	}
	reconnects := 0
	places := &places{queues: l.queues, held: make(map[bucket.Key]*queue)}
	began := l.watch()
	err := l.retry(ctx, "transaction", func() (again, error) {
		lost, err := l.transact(ctx, pgx.Serializable, places, func(tx *lentTx) error { return fn(tx) })
		if places.waited > 0 {
			l.tell(ctx, Queued{Waited: places.waited})
		}
		switch {
		case errors.Is(err, ErrCommitUnknown), errors.Is(err, ErrContended): // the latter of a call that fn made
		case IsRetryable(err):
			l.queues.conflict(places.touched)
			if places.queued {
				return atOnce, err // it will wait for its turn
			}
			return afterPause, err
		case lost && reconnects < maxReconnects:
			reconnects++
			return afterPause, err
		}
		return never, err
	})
	if errors.Is(err, ErrContended) || errors.Is(err, ErrCommitUnknown) || isUnavailable(err) {
		l.fail(ctx, Failed{Verb: "transaction", Err: err}, began)
	}
	return err
}

// transact runs fn in a transaction that the Limiter begins and ends: it commits when fn returns nil, and rolls back
// when fn returns an error, panics or exits its goroutine. What the calls in the transaction did beside their rows takes
// effect when it has committed. places are nil for a transaction that does not queue. lost says that the connection failed
// before COMMIT was sent, so that nothing was written.
func (l *Limiter) transact(ctx context.Context, level pgx.TxIsoLevel, places *places, fn func(tx *lentTx) error) (lost bool, err error) {
	begun, err := l.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
	if err != nil {
		// Nothing was written, whatever broke, unless it is the server that says no.
		return isUnavailable(err) || sqlstate(err) == "", fmt.Errorf("ratelimit: begin: %w", err)
	}
	if places != nil {
		defer places.release() // once the transaction has ended
	}
	ended := false
	defer func() {
		if !ended {
			rollback(ctx, begun)
		}
	}()
	if places != nil {
		places.hold(ctx) // BEGIN takes no snapshot, and whoever waits here has its connection already
	}
	tx := &lentTx{Tx: begun, places: places, effects: &effects{}}
	err = fn(tx)
	switch {
	case tx.ended:
		l.drop(tx.effects.changed) // it may well have committed
		if err == nil {
			err = fmt.Errorf("ratelimit: commit: fn ended the transaction itself: %w", pgx.ErrTxClosed)
		}
		return false, err
	case err != nil:
		return isUnavailable(err) || begun.Conn().IsClosed() && ctx.Err() == nil, err
	case ctx.Err() != nil:
		return false, fmt.Errorf("ratelimit: transaction: %w", ctx.Err())
	case begun.Conn().IsClosed():
		return true, fmt.Errorf("ratelimit: the connection was lost before the commit: %w", pgx.ErrTxClosed)
	}
	err = commit(ctx, begun)
	ended = true
	switch {
	case err == nil:
		l.committed(ctx, tx.effects)
	case errors.Is(err, ErrCommitUnknown):
		l.drop(tx.effects.changed)
	}
	return false, err
}

// lentTx is a transaction that the Limiter began, as the calls in it and fn of InTx have it, or one that was nested in
// it. Once fn has ended the transaction itself, its connection is back in the pool and may be in use there, and says
// nothing of this transaction any more.
type lentTx struct {
	pgx.Tx
	places  *places  // in the queues; nil when it does not queue
	effects *effects // of the transaction and of those that are nested in it
	before  *mark    // the effects there were when a nested transaction began; nil for the transaction itself
	ended   bool
}

// Begin begins a nested transaction, which is a savepoint: what it does belongs to the transaction, and is undone with
// either.
func (tx *lentTx) Begin(ctx context.Context) (pgx.Tx, error) {
	begun, err := tx.Tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	before := tx.effects.mark()
	return &lentTx{Tx: begun, places: tx.places, effects: tx.effects, before: &before}, nil
}

// Commit of a nested transaction releases its savepoint. Commit of the transaction itself commits it, which InTx
// reports as an error: it is for InTx to do.
func (tx *lentTx) Commit(ctx context.Context) error {
	tx.ended = true
	return tx.Tx.Commit(ctx)
}

// Rollback rolls the transaction, or the nested one, back; so does returning an error from the function it was begun
// for.
func (tx *lentTx) Rollback(ctx context.Context) error {
	tx.ended = true
	err := tx.Tx.Rollback(ctx)
	if err == nil && tx.before != nil {
		tx.effects.undo(*tx.before)
	}
	return err
}

// commit ends tx. What comes back is nil, a definite rollback, or ErrCommitUnknown.
//
// It does not ask pgconn.SafeToRetry: in pgx 5.9 to 5.12 that is true of a connection that was lost while
// the answer to COMMIT was awaited.
func commit(ctx context.Context, tx pgx.Tx) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	err := tx.Commit(ctx)
	var pgErr *pgconn.PgError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, pgx.ErrTxCommitRollback):
		return fmt.Errorf("ratelimit: commit: a statement had failed and fn did not return its error: %w", err)
	case errors.As(err, &pgErr) && pgErr.SeverityUnlocalized == "ERROR":
		return fmt.Errorf("ratelimit: commit: %w", err)
	}
	return fmt.Errorf("%w: %w", ErrCommitUnknown, err)
}

// rollback ends tx even when ctx is cancelled. Its error says nothing that matters: a connection that
// cannot roll back is closed, and the server rolls back what it ran.
func rollback(ctx context.Context, tx pgx.Tx) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	_ = tx.Rollback(ctx)
}

// together runs fn on a Limiter bound to a transaction: the caller's when l is bound to one, else a READ
// COMMITTED one of its own, which is run again when it conflicts. An error of fn rolls that back.
func (l *Limiter) together(ctx context.Context, verb string, fn func(tx *Limiter) error) error {
	return l.retryHeld(ctx, func(l *Limiter) error { return l.togetherOnce(ctx, verb, fn) })
}

// togetherOnce is together, but returns a heldError when fn needs a row that somebody holds.
func (l *Limiter) togetherOnce(ctx context.Context, verb string, fn func(tx *Limiter) error) error {
	if l.pool == nil {
		err := fn(l)
		if err != nil && ctx.Err() != nil && !errors.Is(err, ErrNotReserved) {
			l.spoil(ctx)
		}
		return err
	}
	if err := l.idle(); err != nil {
		return err
	}
	return l.retry(ctx, verb, func() (again, error) {
		err := l.inTx(ctx, fn)
		if IsRetryable(err) {
			return afterPause, err
		}
		return never, err
	})
}

// inTx is together for what is run again by others when it conflicts.
func (l *Limiter) inTx(ctx context.Context, fn func(tx *Limiter) error) error {
	if l.pool == nil {
		return fn(l)
	}
	_, err := l.transact(ctx, pgx.ReadCommitted, nil, func(tx *lentTx) error {
		bound := l.WithTx(tx)
		bound.own = true
		return fn(bound)
	})
	return err
}

// spoil makes the caller's transaction one that can only be rolled back. A context that ends between two
// statements of a call stops it half-way and leaves the connection alive; one that ends during a statement
// closes it, which comes to the same.
func (l *Limiter) spoil(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	_, _ = l.db.Exec(ctx, "ROLLBACK TO SAVEPOINT "+savepoint+"_cancelled") // there is none
}

// idle returns an error when the pool is one connection that is in a transaction, which ours would end.
func (l *Limiter) idle() error {
	if conn := l.connection(); conn != nil && !conn.IsClosed() && conn.PgConn().TxStatus() != 'I' {
		return fmt.Errorf("%w: the connection is in a transaction; use WithTx", ErrInvalidConfig)
	}
	return nil
}

// connection returns the connection that the pool is, and nil when it is a pool of several.
func (l *Limiter) connection() *pgx.Conn {
	switch pool := l.pool.(type) {
	case *pgx.Conn:
		return pool
	case interface{ Conn() *pgx.Conn }: // a *pgxpool.Conn
		return pool.Conn()
	}
	return nil
}
