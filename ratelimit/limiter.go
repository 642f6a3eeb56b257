package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/internal/batch"
	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// DB is what a call needs of the database. *pgxpool.Pool, *pgxpool.Conn, *pgx.Conn and pgx.Tx have it.
type DB interface {
	Exec(ctx context.Context, sql string, arguments ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error)
	SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults
}

// Pool is a DB that can begin transactions: *pgxpool.Pool, or a *pgx.Conn or *pgxpool.Conn that no one else uses
// meanwhile.
type Pool interface {
	DB
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}

// Limiter decides on requests. It is safe for concurrent use; the one that WithTx returns is for the
// transaction's goroutine, as the transaction is. Make one for a process: transactions queue only with
// those of the same Limiter.
type Limiter struct {
	db         DB   // the pool, or the caller's transaction
	pool       Pool // nil when bound to a transaction
	config     Config
	statements statements
	queues     *queues
	boxes      *boxes
	batcher    *batch.Batcher[call]
	denials    *denials    // nil: no refusal is answered from memory
	effects    *effects    // of the transaction the Limiter is bound to; nil when it is not one of ours
	own        bool        // whether that transaction is of the Limiter's own making, for one call or one batch
	waitFor    *bucket.Key // the row that such a transaction waits for before it locks any; nil: none
	waits      int         // how many rows the call has waited for
	policies   *policies
}

// New returns a Limiter whose calls run on pool. It makes no connection; that the table is there shows at
// the first call.
func New(pool Pool, config Config) (*Limiter, error) {
	if isNil(pool) {
		return nil, fmt.Errorf("%w: the pool is nil; pass what pgxpool.New returned", ErrInvalidConfig)
	}
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	l := &Limiter{
		db: pool, pool: pool, config: config, statements: newStatements(config.Schema),
		queues: newQueues(), boxes: &boxes{}, policies: &policies{},
	}
	l.batcher, l.denials = newBatcher(l), newDenials(config.DenyCache, l.asOf)
	return l, nil
}

// Close lets no more Take, Check, Value and Reserve outside of transactions in, which fail with ErrClosed from then
// on, and waits until those that are under way have been answered, or until ctx ends. What is to be ended still can
// be, with Settle, Cancel, Credit and the like, and transactions go on. It leaves the pool open. A Limiter that is
// not used any more needs no Close: it keeps nothing running.
func (l *Limiter) Close(ctx context.Context) error {
	if err := l.ready(context.WithoutCancel(ctx), "close"); err != nil {
		return err
	}
	if l.pool == nil {
		return fmt.Errorf("%w: close of a Limiter of WithTx; close the one that New returned", ErrInvalidConfig)
	}
	if err := l.batcher.Close(ctx); err != nil {
		return fmt.Errorf("ratelimit: close: %w", err)
	}
	return nil
}

// Schema returns the schema of the limiter's tables.
func (l *Limiter) Schema() string { return l.config.Schema }

// WithTx returns a Limiter whose calls are part of tx: they commit with it and are undone with it, at
// whatever isolation level it runs. They never retry and use no other connection. A serialization failure
// comes back as an error for which IsRetryable is true, and whoever owns the transaction runs it again.
//
// A call over several limits, and one on a reservation, sets a savepoint, which stays until the transaction
// ends. A call whose context ends half-way makes the transaction one that can only be rolled back.
//
// Inside the transaction use this Limiter only: a call on l is on another connection, and waits for a row that the
// transaction holds until its context ends, or the time of Config.Timeout.
//
// The calls lock the rows of their buckets to the end of the transaction, as your own updates do: see the package
// documentation for what that means for two transactions that take from two buckets.
func (l *Limiter) WithTx(tx pgx.Tx) *Limiter {
	if l == nil {
		return nil
	}
	bound := *l
	bound.db, bound.pool, bound.effects, bound.own = tx, nil, nil, false
	if ours, ok := tx.(*lentTx); ok {
		bound.effects = ours.effects
	}
	return &bound
}

// InTransaction reports whether the Limiter is bound to a transaction by WithTx.
func (l *Limiter) InTransaction() bool { return l != nil && l.pool == nil }

// Take takes what the requests cost from all of their limits, or from none of them.
//
// The decision is Allowed, or it says how long to wait. An error is a failure, never a refusal: treat
// the request as refused. Requests that could never be allowed are errors: see ErrInvalidCost,
// ErrInvalidKey, ErrCostExceedsCapacity and ErrInvalidRequest, all found before any SQL is sent, so that
// the transaction stays usable.
//
// Outside a transaction the call is one round trip and its own commit, for which it has the time of Config.Timeout.
// Conflicts are retried; a connection that fails during the call, or a time that ends, leaves it open whether the tokens
// were taken, and that is an error too.
// A call whose costs are all 0 takes and writes nothing, as Check.
func (l *Limiter) Take(ctx context.Context, requests ...Request) (Decision, error) {
	began := l.watch()
	if d, known := l.recallOne(ctx, requests); known {
		l.decided(ctx, Decided{Verb: "take", Decision: d, Cached: true}, began)
		return d, nil
	}
	p, err := l.begin(ctx, "take", requests, false)
	if err != nil {
		return Decision{}, err
	}
	c := p.of("take", p.free(), false)
	d, known, err := l.recall(ctx, c)
	if err != nil {
		return Decision{}, l.failed(ctx, "take", p, began, err)
	}
	l.decided(ctx, Decided{Verb: "take", Decision: d, Cached: known}, began)
	return d, nil
}

// Check returns the decision Take would return, and takes nothing. Somebody else may take the tokens
// before you do, so do not check first and take later: take, and give up the work when refused.
//
// It reads with a SELECT. In a SERIALIZABLE transaction that read takes part in conflict detection as
// any read of yours, which Take avoids.
func (l *Limiter) Check(ctx context.Context, requests ...Request) (Decision, error) {
	p, err := l.begin(ctx, "check", requests, false)
	if err != nil {
		return Decision{}, err
	}
	began := l.watch()
	c := p.of("check", true, false)
	if err := l.submit(ctx, c); err != nil {
		return Decision{}, l.failed(ctx, "check", p, began, err)
	}
	d := p.decide(p.project(c.answers))
	l.decided(ctx, Decided{Verb: "check", Decision: d}, began)
	return d, nil
}

// Value returns what the bucket of request holds, to show it or to project it. The request's cost does
// not matter. It reads as Check does.
func (l *Limiter) Value(ctx context.Context, request Request) (Value, error) {
	p, err := l.begin(ctx, "value", []Request{request.Cost(0)}, false)
	if err != nil {
		return Value{}, err
	}
	began := l.watch()
	c := p.of("value", true, false)
	if err := l.submit(ctx, c); err != nil {
		return Value{}, l.failed(ctx, "value", p, began, err)
	}
	return p.buckets[0].reading(c.answers[0]), nil
}

// Reset fills the buckets of the requests to their capacity, as on a successful login. Debts are
// forgotten with the rest, so reserved work that has not run yet comes on top. A fixed window stays where it
// is. In a transaction the reset is undone with it.
func (l *Limiter) Reset(ctx context.Context, requests ...Request) error {
	p, err := l.begin(ctx, "reset", costless(requests), false)
	if err != nil {
		return err
	}
	ctx, cancel := l.bounded(ctx)
	defer cancel()
	began := l.watch()
	if err := l.changeAlone(ctx, "reset", func(l *Limiter) error { return l.fill(ctx, p) }); err != nil {
		return l.failed(ctx, "reset", p, began, err)
	}
	l.invalidate(p)
	return nil
}

// costless returns the requests without their costs.
func costless(requests []Request) []Request {
	free := make([]Request, len(requests))
	for i, r := range requests {
		free[i] = r.Cost(0)
	}
	return free
}

// begin does what every call does before SQL.
func (l *Limiter) begin(ctx context.Context, verb string, requests []Request, reserve bool) (*plan, error) {
	if err := l.ready(ctx, verb); err != nil {
		return nil, err
	}
	return l.plan(requests, reserve)
}

// ready returns an error when the Limiter or the context cannot be used.
func (l *Limiter) ready(ctx context.Context, verb string) error {
	switch {
	case l == nil || l.queues == nil:
		return fmt.Errorf("%w: %s on a Limiter that New did not return", ErrInvalidConfig, verb)
	case isNil(l.db):
		return fmt.Errorf("%w: %s on a nil transaction; pass WithTx the one you began", ErrInvalidConfig, verb)
	case ctx.Err() != nil:
		return fmt.Errorf("ratelimit: %s: %w", verb, ctx.Err())
	}
	return nil
}

// submit answers c: in the caller's transaction when l is bound to one, else with others who call meanwhile.
func (l *Limiter) submit(ctx context.Context, c *call) error {
	if l.pool == nil {
		return l.alone(ctx, c)
	}
	if err := l.idle(); err != nil {
		return err
	}
	c.Several = c.simple() && c.plan.sharded()
	if !c.look {
		c.Needs(len(c.plan.buckets), func(i int) bucket.Key { return c.plan.buckets[i].bucketKey() })
	}
	return l.batcher.Do(ctx, &c.Call)
}

// decided tells the observer of a decision on a call that began then.
func (l *Limiter) decided(ctx context.Context, event Decided, began time.Time) {
	if l.config.Observer == nil {
		return
	}
	event.Began, event.Elapsed, event.Shadow, event.Pending = began, l.since(began), inShadow(ctx), l.pending()
	l.tell(ctx, event)
}

// failed returns err with what was being done, and tells the observer. It names the limit, and never a key.
func (l *Limiter) failed(ctx context.Context, verb string, p *plan, began time.Time, err error) error {
	if l.pool != nil && !changedNothing(err) { // who knows what it took
		l.invalidate(p)
	}
	name := p.buckets[p.asked[0].bucket].limit.name // the first asked: buckets are in the order of locking
	err = during(fmt.Sprintf("%s %q", verb, name), l.explain(err))
	l.fail(ctx, Failed{Verb: verb, Limit: name, Err: err}, began)
	return err
}

// fail tells the observer of a failure of a call that began then, unless its caller gave up. What the
// transaction does afterwards does not undo it.
func (l *Limiter) fail(ctx context.Context, event Failed, began time.Time) {
	if l.config.Observer == nil || errors.Is(ctx.Err(), context.Canceled) {
		return
	}
	event.Began, event.Elapsed, event.Shadow = began, l.since(began), inShadow(ctx)
	l.config.Observer.Observe(ctx, event)
}

// explain adds to err what to do about it where the server's words do not say.
func (l *Limiter) explain(err error) error {
	switch sqlstate(err) {
	case codeUndefinedTable, codeUndefinedColumn, codeInvalidSchemaName:
		return fmt.Errorf("%w (schema %q): %w", ErrNotMigrated, l.config.Schema, err)
	case codeInsufficientPrivilege:
		return fmt.Errorf("%w; the role needs USAGE on schema %q, and SELECT, INSERT, UPDATE and DELETE on its tables buckets and reservations", err, l.config.Schema)
	case codeReadOnly:
		return fmt.Errorf("%w; the transaction may not write (default_transaction_read_only may be on), or the server is a standby: connect to the primary, as with target_session_attrs=read-write", err)
	}
	switch {
	case !errors.Is(err, context.DeadlineExceeded):
	case l.pool == nil:
		return fmt.Errorf("%w; another transaction may hold a row that the call waited for", err)
	default:
		return fmt.Errorf("%w; a transaction may hold a row that the call waited for, or all connections of the pool: inside one, call the Limiter of WithTx", err)
	}
	return err
}

// isNil reports whether v is nil or holds a nil pointer.
func isNil(v any) bool {
	r := reflect.ValueOf(v)
	return !r.IsValid() || r.Kind() == reflect.Pointer && r.IsNil()
}
