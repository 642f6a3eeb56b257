package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/internal/store"
	"github.com/pgratelimit/pgratelimit/internal/turns"
)

// maxReconnects bounds the attempts that end because the connection, not the transaction, failed: a
// server that is down should be reported soon.
const maxReconnects = 3

// WithTx returns a Limiter whose calls are part of tx: they commit and roll back with it, at any isolation level. They never retry and use
// no other connection. A serialization failure comes back as an error for which IsRetryable is true, and the owner of the transaction runs
// it again. The buckets are in the database of tx, whichever pool the Limiter has. Wait, Hold, Keep, Prune, Close and InTx cannot be part
// of a transaction: on this Limiter they return ErrInvalidConfig.
//
// A call over several limits, and one on a reservation, sets a savepoint, which stays until the transaction ends. A refused call over
// several limits keeps no row locked, except one that a wrong clock had written. After a call whose context ended half-way the
// transaction can only be rolled back.
//
// Inside the transaction use this Limiter only: a call on l is on another connection, and waits for a row that the
// transaction holds until its context ends, or the time of Config.Timeout.
//
// The calls lock the rows of their buckets to the end of the transaction, as your own updates do: see docs/promises.md
// for what that means for two transactions that take from two buckets.
//
// For a transaction of database/sql there is package sqllimit.
func (l *Limiter) WithTx(tx Tx) *Limiter {
	if l == nil {
		return nil
	}
	bound := *l
	bound.pool, bound.config.Timeout = nil, -1
	bound.reports.inTx, bound.reports.after = true, nil
	var queue store.Queue
	ours, ok := tx.(*ownedTx)
	if ok {
		bound.reports.after = ours.after
		if ours.ticket != nil {
			queue = ours.ticket
		}
	}
	bound.session = l.store.InTx(tx, owner{&bound}, queue)
	switch {
	case isNil(tx):
		bound.misuse = "on a nil transaction; pass WithTx the one you began"
	case l.store != nil && bound.session.IsElsewhere():
		bound.misuse = "of a Limiter in memory in a transaction of something else; pass WithTx one of InTx, or of Begin or OpenSQL of its DB"
	}
	return &bound
}

// InTx runs fn in a SERIALIZABLE transaction and commits when fn returns nil. Pass tx to [Limiter.WithTx] to take limits in it. When the
// transaction conflicts with another, at a statement or at COMMIT, it rolls back, and after a random pause fn runs again from the start in
// a new transaction. So fn must not do anything that cannot be repeated, and must return the errors of its statements.
//
// Transactions of one Limiter that conflicted at a bucket queue for it from then on, each before its first statement if that takes from
// the bucket. So take limits first: a transaction that read something before already has its snapshot, and must run again after the wait,
// unless [WithQueue] names the bucket. With Config.SharedQueues they queue across processes, too. They lose to READ COMMITTED transactions
// that wait for the bucket, and need more attempts the more of these there are: see Config.MaxAttempts.
//
// An error of fn, for example a *LimitedError, rolls back and is returned unchanged. InTx returns ErrContended when each attempt of
// Config.MaxAttempts lost, the context's error when it ended meanwhile, and ErrCommitUnknown when the connection failed after COMMIT was
// sent, which is never retried. On every other error nothing was written and nothing was taken, unless fn ended the transaction itself.
//
// fn must not end the transaction, neither with tx.Commit or tx.Rollback nor with SQL. If it does, InTx returns an error, and reports no
// tokens to the Observer. Statements after SQL that ended the transaction, and calls of WithTx(tx), commit by themselves. InTx cannot
// detect SQL that begins another transaction at once, such as ROLLBACK AND CHAIN: it commits that one and returns nil.
//
// Transactions that fn nests in tx, with tx.Begin or pgx.BeginFunc, are part of it, and WithTx takes them too. If one is rolled back, its
// tokens are back, and the Observer hears only of its refusals. A ROLLBACK TO SAVEPOINT that fn executes as SQL gives tokens back as well,
// but the Observer hears of what was taken.
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
	if err := notInTx(l.pool); err != nil {
		return err
	}
	// The transaction itself meets other errors, and may be able to mend them.
	if err := l.pass(ctx, "transaction", true, false); isAnyOf(err, ErrHashKeyMismatch, ErrPoolerMode) {
		return during("transaction", err)
	}
	ticket, err := ticketOf(ctx, l)
	if err != nil {
		return err
	}
	reconnects, lost := 0, false
	var began time.Time
	if l.reports.observer != nil {
		began = time.Now()
	}
	attempt := func() (_ again, err error) {
		lost, err = l.transact(ctx, pgx.Serializable, ticket, func(tx *ownedTx) error { return fn(tx) })
		if waited := ticket.Waited(); waited > 0 {
			l.reports.tell(ctx, Queued{Waited: waited})
		}
		switch {
		case err == nil:
		case errors.Is(err, ErrCommitUnknown), errors.Is(err, ErrContended): // the latter of a call that fn made
		case IsRetryable(err):
			if ticket.Conflict() {
				return atOnce, err
			}
			return afterPause, err
		case lost && reconnects < maxReconnects:
			reconnects++
			return afterPause, err
		}
		return never, err
	}
	when, err := attempt()
	if when != never {
		err = retry(ctx, l, "transaction", when, err, attempt)
	}
	l.leaveReadOnly(ctx, err)
	if err != nil && hasFailed(lost, err) {
		l.reports.failed(ctx, Failed{Verb: "transaction", Err: err}, began)
	}
	return err
}

// transact runs fn in a transaction that the Limiter begins and ends: it commits when fn returns nil, and rolls back
// when fn returns an error, panics or exits its goroutine. Then it reports what the calls did. A nil ticket
// is of a transaction that does not queue. lost says that the connection failed before COMMIT was sent, so that nothing was written.
func (l *Limiter) transact(ctx context.Context, level pgx.TxIsoLevel, ticket *turns.Ticket, fn func(tx *ownedTx) error) (lost bool, err error) {
	begun, err := beginTx(ctx, l, level)
	if err != nil {
		// Nothing was written, whatever broke, unless it is the server that says no.
		lost := isUnavailable(err) || store.SQLState(err) == ""
		if store.SQLState(err) == codeNotSupported {
			err = fmt.Errorf("%w; the server is a standby: "+toThePrimary, err)
		}
		return lost, during("begin", err)
	}
	if ticket != nil {
		begun = ticket.Begin(begun)
		defer ticket.Release() // once the transaction has ended
	}
	tx, ended := &ownedTx{Tx: begun, ticket: ticket, after: &afterCommit{}}, false
	defer func() {
		committed := ended && err == nil
		if !ended {
			rollback(ctx, begun)
		}
		if committed || tx.ended || errors.Is(err, ErrCommitUnknown) { // the latter two may have committed
			l.reports.ended(tx.after)
		}
		if !committed {
			tx.after.undo(mark{})
		}
		if err == nil || !hasFailed(lost, err) {
			for _, notice := range tx.after.told {
				notice.tell()
			}
		}
	}()
	if ticket != nil {
		ticket.Again(ctx) // BEGIN takes no snapshot, and whoever waits here has its connection already
	}
	err = fn(tx)
	tx.ended = tx.ended || isIdle(begun)
	switch {
	case tx.ended:
		if err == nil {
			err = fmt.Errorf("ratelimit: commit: fn ended the transaction itself; its writes may be committed; return nil to commit, or an error to roll back: %w", pgx.ErrTxClosed)
		}
		return false, err
	case err != nil:
		return isUnavailable(err) || isClosed(begun) && ctx.Err() == nil, err
	case ctx.Err() != nil:
		return false, fmt.Errorf("ratelimit: transaction: %w", ctx.Err())
	case isClosed(begun):
		return true, during("the connection was lost before the commit", pgx.ErrTxClosed)
	}
	err = commit(ctx, begun)
	ended = true
	return false, err
}

// beginTx begins a transaction. One at READ COMMITTED, which runs statements of the store only, sends BEGIN with the first of them if the
// pool is pgx's and the store's statements need not name one row each.
func beginTx(ctx context.Context, l *Limiter, level pgx.TxIsoLevel) (pgx.Tx, error) {
	pool, isPool := l.pool.(*pgxpool.Pool)
	if !isPool || level != pgx.ReadCommitted || !l.store.IsPlain() {
		return l.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
	}
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	return store.NewOwnTx(conn.Conn(), conn.Release), nil
}

// hasFailed reports whether err says that the database or a concurrent transaction failed a transaction, so that its decisions do not
// count.
func hasFailed(lost bool, err error) bool {
	return lost || isUnavailable(err) || IsRetryable(err) || errors.Is(err, ErrContended) || errors.Is(err, ErrCommitUnknown)
}

// ownedTx is a transaction that the Limiter began, as the calls in it and fn of InTx have it, or one that was nested in
// it. Once fn has ended the transaction itself, its connection is back in the pool and may be in use there, and says
// nothing of this transaction any more.
type ownedTx struct {
	pgx.Tx
	ticket *turns.Ticket // in the queues; nil when it does not queue
	after  *afterCommit  // of the transaction and of those that are nested in it
	before *mark         // what there was of it when a nested transaction began; nil for the transaction itself
	ended  bool
}

// Unwrap returns the transaction as the pool began it, for package sqllimit.
func (tx *ownedTx) Unwrap() pgx.Tx { return tx.Tx }

// Engine returns what the store's rows are on, where that is not Postgres.
func (tx *ownedTx) Engine() store.Engine { return store.EngineOf(tx.Tx) }

// Begin begins a nested transaction, which is a savepoint: what it does belongs to the transaction, and is undone with
// either.
func (tx *ownedTx) Begin(ctx context.Context) (pgx.Tx, error) {
	begun, err := tx.Tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	before := tx.after.mark()
	return &ownedTx{Tx: begun, ticket: tx.ticket, after: tx.after, before: &before}, nil
}

// Commit of a nested transaction releases its savepoint. Commit of the transaction itself commits it, which InTx
// reports as an error: it is for InTx to do.
func (tx *ownedTx) Commit(ctx context.Context) error {
	tx.ended = true
	return tx.Tx.Commit(ctx)
}

// Rollback rolls the transaction, or the nested one, back; so does returning an error from the function it was begun
// for.
func (tx *ownedTx) Rollback(ctx context.Context) error {
	tx.ended = true
	err := tx.Tx.Rollback(ctx)
	if err == nil && tx.before != nil {
		tx.after.undo(*tx.before)
	}
	return err
}

// commit ends tx. It returns nil, the error of a definite rollback, or ErrCommitUnknown, also for an error that a Citus coordinator relays
// from a worker, which may have committed.
//
// It does not ask pgconn.SafeToRetry: in pgx 5.9 to 5.12 that is true of a connection that was lost while
// the answer to COMMIT was awaited.
func commit(ctx context.Context, tx pgx.Tx) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), store.EndTimeout)
	defer cancel()
	err := tx.Commit(ctx)
	var pgErr *pgconn.PgError
	var notSent pgx.ErrPreprocessingBatch
	switch {
	case err == nil:
		return nil
	case errors.Is(err, pgx.ErrTxCommitRollback):
		return fmt.Errorf("ratelimit: commit: a statement had failed and fn did not return its error: %w", err)
	case errors.As(err, &notSent):
		return fmt.Errorf("ratelimit: commit: %w", err)
	case errors.As(err, &pgErr) && pgErr.SeverityUnlocalized == "ERROR" && !isOfWorker(pgErr.Code):
		return fmt.Errorf("ratelimit: commit: %w", err)
	}
	return fmt.Errorf("%w: %w", ErrCommitUnknown, err)
}

// rollback ends tx even when ctx is cancelled. Its error says nothing that matters: a connection that
// cannot roll back is closed, and the server rolls back what it ran.
func rollback(ctx context.Context, tx pgx.Tx) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), store.EndTimeout)
	defer cancel()
	_ = tx.Rollback(ctx)
}

// retryTx runs fn once on l if l is bound to the caller's transaction. Otherwise it runs fn in a READ COMMITTED transaction of its own,
// again after a conflict, and rolls back on an error of fn. All attempts together have the time of Config.Timeout. keyed reports whether the call
// names keys that are not in their stored form.
func (l *Limiter) retryTx(ctx context.Context, verb string, keyed bool, fn func(ctx context.Context, tx *Limiter) error) error {
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	if err := l.pass(ctx, verb, keyed, !keyed); err != nil {
		return err
	}
	if l.pool == nil {
		err := fn(ctx, l)
		if errors.Is(err, ErrNotReserved) { // nothing was changed
			return err
		}
		return l.session.OrSpoil(ctx, err)
	}
	return l.session.RetryHeld(ctx, func(from *store.Session) error {
		attempt := func() error {
			return inOwnTx(ctx, l, from, func(tx *Limiter) error { return fn(ctx, tx) })
		}
		return owner{l}.Retry(ctx, verb, attempt(), attempt)
	})
}

// inOwnTx runs fn once on a Limiter bound to a READ COMMITTED transaction of its own.
func inOwnTx(ctx context.Context, l *Limiter, from *store.Session, fn func(tx *Limiter) error) error {
	_, err := l.transact(ctx, pgx.ReadCommitted, nil, func(tx *ownedTx) error {
		bound := l.WithTx(tx)
		bound.session = from.BoundTo(tx.Tx, owner{bound})
		return fn(bound)
	})
	return err
}

// owner is a Limiter as the store knows it.
type owner struct{ *Limiter }

// InOwnTx runs fn once on a session in a READ COMMITTED transaction of the Limiter's own.
func (o owner) InOwnTx(ctx context.Context, from *store.Session, fn func(tx *store.Session) error) error {
	return inOwnTx(ctx, o.Limiter, from, func(tx *Limiter) error { return fn(&tx.session) })
}

// Retry runs attempt after one that ended with err, when that was because of others, and again while it is.
func (o owner) Retry(ctx context.Context, verb string, err error, attempt func() error) error {
	return retry(ctx, o.Limiter, verb, whenAgain(err), err, func() (again, error) {
		err := attempt()
		return whenAgain(err), err
	})
}

// Mended tells the observer that a row was put right.
func (o owner) Mended(ctx context.Context, limit string) { o.reports.tell(ctx, Mended{Limit: limit}) }

// Batched tells the observer of a batch.
func (o owner) Batched(ctx context.Context, calls int, elapsed time.Duration) {
	if o.reports.observer != nil { // else the event is an allocation for nobody
		o.reports.tell(ctx, Batched{Calls: calls, Elapsed: elapsed})
	}
}

// notInTx returns an error when the pool is one connection that is in a transaction, which ours would end.
func notInTx(pool Pool) error {
	if conn := connectionOf(pool); conn != nil && !conn.IsClosed() && conn.PgConn().TxStatus() != 'I' {
		return fmt.Errorf("%w: the connection is in a transaction; use WithTx", ErrInvalidConfig)
	}
	return nil
}

// isClosed reports whether the connection of a transaction that the pool began is closed. One over database/sql has none of
// pgx's to show, and says so itself; one in memory has none.
func isClosed(tx pgx.Tx) bool {
	if own, ok := tx.(interface{ IsClosed() bool }); ok {
		return own.IsClosed()
	}
	conn := tx.Conn()
	return conn != nil && conn.IsClosed()
}

// isIdle reports whether the connection of a transaction that the pool began is in no transaction any more, because fn ended it with SQL.
// It sends nothing. A transaction begun by ROLLBACK AND CHAIN, or by BEGIN after ROLLBACK, looks like the one before it.
func isIdle(tx pgx.Tx) bool {
	if own, ok := tx.(interface{ IsIdle() bool }); ok {
		return own.IsIdle()
	}
	conn := tx.Conn()
	return conn != nil && !conn.IsClosed() && conn.PgConn().TxStatus() == 'I'
}

// connectionOf returns the connection that the pool is, and nil when it is a pool of several.
func connectionOf(pool Pool) *pgx.Conn {
	switch pool := pool.(type) {
	case *pgx.Conn:
		return pool
	case interface{ Conn() *pgx.Conn }: // a *pgxpool.Conn
		return pool.Conn()
	}
	return nil
}
