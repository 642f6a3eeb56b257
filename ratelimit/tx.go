package ratelimit

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/internal/arg"
	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/store"
	"github.com/pgratelimit/pgratelimit/internal/engine/txqueue"
	"github.com/pgratelimit/pgratelimit/internal/pgerr"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// maxReconnects limits the attempts that fail because of the connection, not the transaction, so that a server that is
// down is reported soon.
const maxReconnects = 3

// WithTx returns a Limiter whose calls are part of tx: they commit and roll back with it, at any isolation level, and
// use no other connection. They don't retry, so after an error for which IsRetryable is true, run the transaction
// again. The buckets are in tx's database, even if the Limiter's pool is for another one. Hold, Prune, Close and InTx
// can't be part of a transaction: on this Limiter they return ErrInvalidConfig.
//
// Calls lock their buckets' rows until the transaction ends, as your own updates do; docs/promises.md explains
// deadlocks between transactions that take from two buckets. Some calls, such as those on a reservation, set a
// savepoint, which stays until the end. If a call over several limits is refused, it keeps no row locked, except one
// that a wrong clock had written. If a call's context ends while it runs, the transaction can only be rolled back.
//
// Inside the transaction use only this Limiter, because a call on l uses another connection, and waits for rows that
// the transaction holds until its context ends or Config.Timeout is over.
//
// For transactions of database/sql see package sqllimit.
func (l *Limiter) WithTx(tx Tx) *Limiter {
	if l == nil {
		return nil
	}
	var after *afterCommit
	var queue store.Queue
	if ours, ok := tx.(*ownedTx); ok {
		after = ours.after
		if ours.ticket != nil {
			queue = ours.ticket
		}
	}
	bound := withoutPool(l, after)
	bound.session = l.store.InTx(tx, owner{bound}, queue)
	switch {
	case arg.IsNil(tx):
		bound.misuse = "on a nil transaction; pass WithTx the one you began"
	case l.store != nil && bound.session.IsElsewhere():
		bound.misuse = "of a Limiter in memory in a transaction of something else; pass WithTx one of InTx, or of Begin or " +
			"OpenSQL of its DB"
	}
	return bound
}

// withoutPool returns l for calls in a transaction. A nil after means that the Limiter does not learn whether it
// commits.
func withoutPool(l *Limiter, after *afterCommit) *Limiter {
	bound := *l
	bound.pool, bound.config.Timeout = nil, -1
	bound.reports.inTx, bound.reports.after = true, after
	return &bound
}

// InTx runs fn in a SERIALIZABLE transaction and commits when fn returns nil. To take limits in it, pass tx to
// [Limiter.WithTx]. If the transaction conflicts with another, at a statement or at COMMIT, InTx rolls back, and after
// a random pause or in a queue runs fn again in a new one. It also does so up to three times if the connection is lost
// before COMMIT was sent, or if the server ends it because it was idle in the transaction. So fn must do nothing that
// can't be repeated, and must return its statements' errors.
//
// Once transactions have conflicted at a bucket, they queue for it, each before its first statement if that statement
// takes from the bucket. So take limits first, because a transaction that has read something already has its snapshot,
// and must run again after the wait, unless [WithQueue] names the bucket. A transaction queues for at most a second,
// and then continues. On a *pgxpool.Pool, transactions also queue with those of other processes, once they have
// conflicted with them: one that is still empty begins anew on its connection, with an advisory lock until its end.
// READ COMMITTED transactions that wait for the bucket go first, so InTx then needs more attempts; see
// Config.MaxAttempts.
//
// If fn returns an error, for example a *LimitedError, InTx rolls back and returns that error unchanged. It returns
// ErrContended if all attempts of Config.MaxAttempts conflicted, the context's error if the context ended, and
// ErrCommitUnknown, without another attempt, if the connection failed after COMMIT was sent. After every other error
// nothing was written or taken, unless fn ended the transaction itself.
//
// fn must not end the transaction, neither with tx.Commit or tx.Rollback nor with SQL. If it does, InTx returns an
// error, and reports no tokens to the Observer. Statements after the SQL that ended it, and calls of WithTx(tx), commit
// by themselves. InTx can't detect SQL that immediately begins another transaction, such as ROLLBACK AND CHAIN: it
// commits that one and returns nil.
//
// Nested transactions of tx.Begin or pgx.BeginFunc are part of tx, and WithTx accepts them. If one is rolled back, its
// tokens are restored, and the Observer receives only its refusals. A ROLLBACK TO SAVEPOINT that fn executes as SQL
// also restores tokens, but the Observer still receives the decisions.
//
// On a *pgxpool.Pool, BEGIN is in one message with fn's first statement. So a pgx tracer sees a batch of the two, and
// fn has run if the transaction can't begin. tx.Conn, tx.Prepare, tx.CopyFrom, tx.LargeObjects and tx.Begin send BEGIN
// first.
//
// If ctx is cancelled during COMMIT, COMMIT still runs to its end, for up to five seconds.
func (l *Limiter) InTx(ctx context.Context, fn func(tx pgx.Tx) error) error {
	switch {
	case l == nil || l.pool == nil:
		return fmt.Errorf("%w: InTx begins a transaction and needs a Limiter that New returned, not one of WithTx",
			ErrInvalidConfig)
	case fn == nil:
		return fmt.Errorf("%w: InTx without a function", ErrInvalidRequest)
	case ctx == nil:
		return fmt.Errorf("%w: %w", ErrInvalidRequest, arg.CheckContext(ctx, "InTx"))
	case ctx.Err() != nil:
		return fmt.Errorf("ratelimit: transaction: the context ended before the call: %w", ctx.Err())
	}
	began := l.reports.began()
	// Other errors are ignored here: the transaction will hit them again, and can handle them.
	if err := l.pass(ctx, "transaction", true, false); isAnyOf(err, ErrHashKeyMismatch, ErrPoolerMode,
		pgerr.ErrPartitioned) {
		return during("transaction", err)
	}
	ticket, err := ticketOf(ctx, l)
	if err != nil {
		return err
	}
	reconnects, lost := 0, false
	attempts, told := 0, false
	attempt := func() (_ again, err error) {
		attempts, told = attempts+1, false
		lost, err = transact(ctx, l, pgx.Serializable, ticket, func(tx *ownedTx) error {
			defer func() { told = tx.after.failed }()
			return fn(tx)
		})
		if waited := ticket.Waited(); waited > 0 {
			l.reports.tell(ctx, event.QueueWait{Waited: waited})
		}
		switch {
		case err == nil:
		case errors.Is(err, ErrCommitUnknown), errors.Is(err, ErrContended): // a call of fn can return ErrContended
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
	leaveReadOnly(ctx, l, err)
	if err != nil && (hasFailed(lost, err) || !told && isOfContext(ctx, err)) {
		l.reports.failed(ctx, event.Failed{Verb: "transaction", Err: err}, began)
		return err
	}
	l.reports.transacted(ctx, event.Transacted{Committed: err == nil, Attempts: attempts}, began)
	return err
}

// transact runs fn in a transaction of its own. It commits if fn returns nil, and rolls back if fn returns an error,
// panics or exits its goroutine. Then it reports the events of the calls. A nil ticket means that the transaction does
// not queue. lost reports whether the connection failed before COMMIT was sent or read, so that nothing was written.
func transact(ctx context.Context, l *Limiter, level pgx.TxIsoLevel, ticket *txqueue.Ticket,
	fn func(tx *ownedTx) error,
) (lost bool, err error) {
	begun, err := beginTx(ctx, l, level)
	if err != nil {
		return begunWith(err)
	}
	if ticket != nil {
		defer ticket.Release() // once the transaction has ended
	}
	tx, ended := &ownedTx{Tx: begun, ticket: ticket, after: &afterCommit{}}, false
	defer func() {
		committed := ended && err == nil
		if !ended {
			rollback(ctx, begun)
		}
		if committed || tx.ended || errors.Is(err, ErrCommitUnknown) { // it has committed, or may have
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
	if ticket != nil { // the transaction has no snapshot yet, and already has its connection
		tx.Tx = ticket.Begin(ctx, begun)
	}
	err = fn(tx)
	if lazy, is := begun.(*store.LazyTx); is && lazy.Refused() != nil {
		return begunWith(lazy.Refused())
	}
	tx.ended = tx.ended || isIdle(begun)
	switch {
	case tx.ended:
		if err == nil {
			err = fmt.Errorf("ratelimit: commit: fn ended the transaction itself; its writes may be committed; return nil to "+
				"commit, or an error to roll back: %w", pgx.ErrTxClosed)
		}
		return false, err
	// it ended while the transaction queued
	case err != nil && ctx.Err() != nil && isClosed(begun) && !errors.Is(err, ctx.Err()):
		return false, fmt.Errorf("ratelimit: transaction: %w: %w", ctx.Err(), err)
	case err != nil:
		return isUnavailable(err) || isClosed(begun) && ctx.Err() == nil && !isUnsent(err), err
	case ctx.Err() != nil:
		return false, fmt.Errorf("ratelimit: transaction: %w", ctx.Err())
	case isClosed(begun):
		return true, during("the connection was lost before the commit", pgx.ErrTxClosed)
	}
	err = commit(ctx, begun)
	ended = true
	return pgerr.Code(err) == codeIdleInTransaction, err
}

// beginTx begins a transaction. On a pool of pgx, BEGIN is sent with its first statement, unless the statements of the
// store must name one row each.
func beginTx(ctx context.Context, l *Limiter, level pgx.TxIsoLevel) (pgx.Tx, error) {
	options := pgx.TxOptions{IsoLevel: level}
	pool, isPool := l.pool.(*pgxpool.Pool)
	if !isPool || !l.store.IsPlain() {
		return l.pool.BeginTx(ctx, options)
	}
	tx, err := store.NewLazyTx(ctx, pool, l.execMode(), options)
	if err != nil {
		return nil, err
	}
	return tx, nil
}

// ownedTx is a transaction that the Limiter began, or one nested in it, as fn of InTx and its calls get it. Once fn has
// ended it, its connection is back in the pool, and may be used by others, so its status says nothing about this
// transaction.
type ownedTx struct {
	pgx.Tx
	ticket *txqueue.Ticket // its place in the queues; nil if it does not queue
	after  *afterCommit    // shared with nested transactions
	before *mark           // the state of after when a nested transaction began; nil if it is not nested
	ended  bool
}

// Unwrap returns the transaction of the pool, for package sqllimit.
func (tx *ownedTx) Unwrap() pgx.Tx { return tx.Tx }

// Engine returns the engine of the store's rows, or nil on Postgres.
func (tx *ownedTx) Engine() store.Ledgers { return store.EngineOf(tx.Tx) }

// Begin begins a nested transaction, which is a savepoint. Its changes are undone if it or its parent rolls back.
func (tx *ownedTx) Begin(ctx context.Context) (pgx.Tx, error) {
	begun, err := tx.Tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	before := tx.after.mark()
	return &ownedTx{Tx: begun, ticket: tx.ticket, after: tx.after, before: &before}, nil
}

// Commit releases the savepoint of a nested transaction. On the transaction of InTx it commits, and InTx then returns
// an error, because only InTx may commit it.
func (tx *ownedTx) Commit(ctx context.Context) error {
	tx.ended = true
	return tx.Tx.Commit(ctx)
}

// Rollback rolls back the transaction or the nested one, as does an error returned from the function it was begun for.
func (tx *ownedTx) Rollback(ctx context.Context) error {
	tx.ended = true
	err := tx.Tx.Rollback(ctx)
	if err == nil && tx.before != nil {
		tx.after.undo(*tx.before)
	}
	return err
}

// commit ends tx. It returns nil, the error of a definite rollback, or ErrCommitUnknown. ErrCommitUnknown also covers
// errors that a Citus coordinator relays from a worker, which may have committed. A FATAL error of the server can come
// before it has read COMMIT, or after it has committed, for example when it waited for a standby. Only 25P03 certainly
// comes before: the server raises it while it waits for a command.
//
// It does not use pgconn.SafeToRetry: in pgx 5.9 to 5.12 that reports true for a connection that was lost while waiting
// for the answer to COMMIT.
func commit(ctx context.Context, tx pgx.Tx) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), store.EndTimeout)
	defer cancel()
	err := tx.Commit(ctx)
	var notSent pgx.ErrPreprocessingBatch
	switch {
	case err == nil:
		return nil
	case errors.Is(err, pgx.ErrTxCommitRollback):
		return fmt.Errorf("ratelimit: commit: a statement had failed and fn did not return its error: %w", err)
	case errors.As(err, &notSent):
		return fmt.Errorf("ratelimit: commit: %w", err)
	case isRolledBack(err):
		return fmt.Errorf("ratelimit: commit: %w", err)
	}
	return fmt.Errorf("%w: %w", ErrCommitUnknown, err)
}

// rollback ends tx even if ctx is cancelled. Its error is ignored: a connection that cannot roll back is closed, and
// the server rolls back.
func rollback(ctx context.Context, tx pgx.Tx) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), store.EndTimeout)
	defer cancel()
	_ = tx.Rollback(ctx)
}

// retryTx runs fn once on l if l is bound to the caller's transaction. Otherwise it runs fn in a READ COMMITTED
// transaction of its own, runs it again after a conflict, and rolls back if fn returns an error. All attempts together
// take at most Config.Timeout. keyed is whether the call names keys that are not in their stored form.
func retryTx(ctx context.Context, l *Limiter, verb string, keyed bool,
	fn func(ctx context.Context, tx *Limiter) error,
) error {
	ctx, cancel := l.config.bounded(ctx)
	defer cancel()
	if err := l.pass(ctx, verb, keyed, !keyed); err != nil {
		return err
	}
	if l.pool == nil {
		err := fn(ctx, l)
		if errors.Is(err, ErrNotReserved) { // nothing changed
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
	_, err := transact(ctx, l, pgx.ReadCommitted, nil, func(tx *ownedTx) error {
		bound := withoutPool(l, tx.after)
		bound.session = from.BoundTo(tx.Tx, owner{bound})
		return fn(bound)
	})
	return err
}

// isClosed reports whether the connection of a transaction of the pool is closed. A transaction over database/sql
// answers itself, because it has no connection of pgx. A transaction in memory has no connection.
func isClosed(tx pgx.Tx) bool {
	if own, ok := tx.(interface{ IsClosed() bool }); ok {
		return own.IsClosed()
	}
	conn := tx.Conn()
	return conn != nil && conn.IsClosed()
}

// isIdle reports whether the connection of a transaction of the pool is in no transaction, because fn ended it with
// SQL. It sends nothing. It cannot detect a transaction begun by ROLLBACK AND CHAIN, or by BEGIN after ROLLBACK.
func isIdle(tx pgx.Tx) bool {
	if own, ok := tx.(interface{ IsIdle() bool }); ok {
		return own.IsIdle()
	}
	conn := tx.Conn()
	return conn != nil && !conn.IsClosed() && conn.PgConn().TxStatus() == 'I'
}

type queueKey struct{}

// WithQueue makes InTx with the returned context queue for the requests' buckets before its transaction's first
// statement, as if it had already conflicted there. Use it for transactions that read something before they take:
// otherwise they queue after they have their snapshot, and must run twice if others want the bucket. If a key is
// invalid, InTx returns an error.
func WithQueue(ctx context.Context, requests ...Request) context.Context {
	return context.WithValue(ctx, queueKey{}, requests)
}

// ticketOf returns the ticket of a call of InTx for the queues, with the buckets of WithQueue.
func ticketOf(ctx context.Context, l *Limiter) (*txqueue.Ticket, error) {
	requests, _ := ctx.Value(queueKey{}).([]Request)
	named := make([]bucket.Key, len(requests))
	for i := range requests {
		key, err := storedKey(l.config.HashKey, &requests[i])
		if err != nil {
			return nil, during("transaction", err)
		}
		named[i] = bucket.Key{Name: requests[i].limit.Name(), Key: key}
	}
	return l.queues.Ticket(named), nil
}
