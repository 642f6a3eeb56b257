package ratelimit

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/internal/arg"
	"github.com/pgratelimit/pgratelimit/internal/engine/batch"
	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
	"github.com/pgratelimit/pgratelimit/internal/engine/preflight"
	"github.com/pgratelimit/pgratelimit/internal/engine/refusalcache"
	"github.com/pgratelimit/pgratelimit/internal/engine/reserved"
	"github.com/pgratelimit/pgratelimit/internal/engine/store"
	"github.com/pgratelimit/pgratelimit/internal/engine/txqueue"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

// DB has the methods that a call needs. *pgxpool.Pool and pgx.Tx implement it.
type DB interface {
	Exec(ctx context.Context, sql string, arguments ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error)
	SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults
}

// Tx is a transaction, such as pgx.Tx. Its extra methods tell it from a pool: a Limiter of WithTx calls neither.
type Tx interface {
	DB
	Commit(ctx context.Context) error
	Rollback(ctx context.Context) error
}

// Pool is a DB that can begin transactions, for any number of callers at once: a *pgxpool.Pool. If a program may have
// only one connection, set pool_max_conns=1 in its connection string.
type Pool interface {
	DB
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}

// Limiter decides on requests. It's safe for concurrent use, but use a Limiter of WithTx only on its transaction's
// goroutine. Make one Limiter per process, because calls share statements only with calls of the same Limiter.
type Limiter struct {
	pool     Pool   // nil for a Limiter of WithTx
	misuse   string // why the transaction of WithTx cannot be used; empty if it can
	config   Config
	store    *store.Store
	session  store.Session // on the pool, or the transaction
	batcher  *batch.Batcher[store.Call]
	cache    *refusalcache.Cache // nil: no refusal is answered from memory
	queues   *txqueue.Queues
	row      uint64                   // picks rows of buckets with Shards; 0: the first
	execMode func() pgx.QueryExecMode // of a *pgxpool.Pool
	reports  reports
	policies *policies
	places   *reserved.Places
	gate     *preflight.Gate
	leaving  *preflight.Leaving
}

// New returns a Limiter whose calls run on pool. It makes no connection, so if the tables are missing, the first call
// returns ErrNotMigrated.
func New(pool Pool, config Config) (*Limiter, error) {
	if arg.IsNil(pool) {
		return nil, fmt.Errorf("%w: the pool is nil; pass what pgxpool.New returned", ErrInvalidConfig)
	}
	switch pool.(type) {
	case *pgx.Conn, *pgxpool.Conn:
		return nil,
			fmt.Errorf("%w: a %T can run only one call at a time; pass a *pgxpool.Pool, with pool_max_conns=1 in its "+
				"connection string if it may have only one connection", ErrInvalidConfig, pool)
	}
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	newStore, row := store.New, rand.Uint64()|1
	if store.EngineOf(pool) != nil { // of package ratelimittest: it has no other processes, and batching gains nothing
		config.NoBatching, newStore, row = true, store.NewInMemory, 0
	}
	shared, mode := "", func() pgx.QueryExecMode { return pgx.QueryExecModeCacheStatement }
	// a queued transaction begins anew, and the BeginTx of another pool may do more than BEGIN
	if p, ok := pool.(*pgxpool.Pool); ok {
		shared, mode = config.Schema,
			sync.OnceValue(func() pgx.QueryExecMode { return p.Config().ConnConfig.DefaultQueryExecMode })
	}
	var asOf func() *int64
	if config.AsOf != nil {
		asOf = config.asOf
	}
	l := &Limiter{
		pool: pool, config: config, store: newStore(store.Options{
			Schema: config.Schema, AsOf: asOf,
			RelaxedCommit: config.RelaxedCommit,
		}),
		cache: refusalcache.New(config.RefusalCache, asOf), queues: txqueue.New(shared), row: row, execMode: mode,
		policies: &policies{}, places: &reserved.Places{},
		leaving: &preflight.Leaving{}, gate: preflight.New(preflight.Options{
			Secret: config.HashKey, Schema: config.Schema, ErrMismatch: ErrHashKeyMismatch, ErrPoolerMode: ErrPoolerMode,
		}),
	}
	l.reports = reports{observer: config.Observer, refused: config.Refused, allowed: config.Allowed, cache: l.cache}
	l.session = l.store.OnPool(pool, owner{l})
	l.batcher = batch.New[store.Call](&l.session, batch.Options{
		Apart:      func() bool { return config.NoBatching || l.store.IsRouted() },
		MaxWaiting: config.MaxWaiting, Timeout: config.Timeout, ErrClosed: ErrClosed, ErrOverloaded: ErrOverloaded,
	})
	return l, nil
}

// Close rejects new calls and waits for the calls in progress, or until ctx ends. From then on Require, Take, Check,
// CheckReserve, Value, Reserve, Acquire and Hold return ErrClosed. Calls that end or correct something, such as Settle,
// Cancel, Release and Credit, still work, and so do calls in transactions. The pool stays open. You needn't close a
// Limiter, because it keeps nothing running.
func (l *Limiter) Close(ctx context.Context) error {
	if err := l.ready(detached(ctx), "close"); err != nil {
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

// InTransaction reports whether WithTx returned the Limiter.
func (l *Limiter) InTransaction() bool { return l != nil && l.pool == nil }

// Observe passes event to the Observer, if there is one. Guards in front of handlers use it to report [event.Answered]
// events.
func (l *Limiter) Observe(ctx context.Context, e event.Event) {
	if ctx == nil { // observers read values of it
		ctx = context.Background()
	}
	l.reports.tell(ctx, e)
}

// inBackground returns l for background work. It recovers panics of the Observer, which would end the process there.
func inBackground(l *Limiter) *Limiter {
	if l == nil || l.reports.observer == nil {
		return l
	}
	background := *l
	background.reports.observer = recovering{l.reports.observer}
	background.session = l.store.OnPool(l.pool, owner{&background})
	return &background
}

// Config holds the settings of a Limiter. The zero Config is ready for use.
type Config struct {
	// Schema is the schema of the tables that migrations.Up made. Defaults to "ratelimit".
	Schema string
	// HashKey is a secret of at least 16 bytes. If set, the tables store a key's HMAC-SHA-256 (base64url) in its place, so
	// they hold no personal data, and a key may be any bytes, up to 64 KiB. Defaults to nil: keys are stored as they are.
	//
	// All programs on a schema need the same secret, or none. Others get ErrHashKeyMismatch, because each compares a
	// fingerprint of its secret with the table fingerprint (see docs/operations.md), and again after ErrNotMigrated. If
	// you make the tables anew or restore them, restart programs that made no call meanwhile.
	HashKey []byte
	// MaxAttempts limits the attempts of InTx, and of a call outside a transaction, that conflict with other transactions.
	// Waiting for a locked row isn't an attempt. Defaults to 200.
	MaxAttempts int
	// Timeout limits each call outside a transaction, with all its attempts, the wait for a connection, and the wait for
	// rows that open transactions hold. The error is then context.DeadlineExceeded to errors.Is, and it's unknown whether
	// the call took tokens. For Prune and Expire it limits each of their transactions. It doesn't limit InTx, which runs
	// your function, nor calls in transactions, which their contexts limit. A COMMIT that was sent can take five seconds
	// more, and concurrent calls a sixteenth more, because their time is checked only now and then. Defaults to 10
	// seconds; below 0 there is no limit.
	//
	// The Limiter cancels the statement of a call that has timed out. If the cancel request overtakes the statement, it
	// has no effect, and the statement may wait for its row. To have the server end that one, too, set
	// client_connection_check_interval (Postgres 14, in the pool's RuntimeParams).
	Timeout time.Duration
	// StaleAfter is how long after ReadyAt reserved work may start and keep its turn; see Limiter.Start. Defaults to 0:
	// forever.
	StaleAfter time.Duration
	// ExpireAfter is how long after ReadyAt Limiter.Expire ends a reservation that is still open. Defaults to 24 hours.
	ExpireAfter time.Duration
	// ReleaseExpired returns the tokens of reservations that expire. Defaults to false: the tokens stay spent, because the
	// work may have run in a process that died before it settled.
	ReleaseExpired bool
	// NoBatching gives each call outside a transaction its own statement. Defaults to false: concurrent calls share a
	// statement, which uses the first call's context values. A batch for one bucket waits for its row. A batch for several
	// skips rows that other transactions hold, and the calls that need such a row wait by themselves.
	NoBatching bool
	// MaxWaiting limits the calls outside a transaction that wait for their batch; further ones return ErrOverloaded.
	// Calls behind rows that stay locked are counted separately: at most MaxWaiting, and half of it behind one row.
	// Defaults to 10,000.
	MaxWaiting int
	// RelaxedCommit lets calls outside a transaction return before their commit is on disk, which makes a lone caller 1.8
	// to 2 times as fast (BENCHMARKS.md#what-it-costs), or more on a slow disk. Defaults to false.
	//
	// If the server crashes, it can forget what these calls took or returned in the last three wal_writer_delay (0.6
	// seconds by default), but only whole calls, and the limits then allow that much again. Redis promises less by default
	// (appendfsync everysec). Calls in a transaction, ChargeUntil, reservations, leases, stored rules, and calls on tables
	// that Citus distributes still wait for the disk. The setting is in the call's statement (synchronous_commit), so
	// sessions keep theirs, also behind PgBouncer.
	RelaxedCommit bool
	// RefusalCache is the number of buckets whose refusal of a Take outside a transaction is remembered, up to 100
	// million; a number below 64 counts as 64. Until the refusal's wait is over, a Take of at least that cost is refused
	// from memory, without a round trip. Defaults to 0: no cache.
	//
	// The cache learns immediately what this Limiter takes or returns (from InTx at the commit), and of a changed policy.
	// It learns within a second what other processes, and transactions that you began, do, so until then a call can be
	// refused although tokens were returned. Tokens taken meanwhile aren't in RetryAfter and Remaining, so a caller that
	// comes back in time can be refused again. In a call over several limits, the states of limits that didn't refuse can
	// be out of date, too.
	RefusalCache int
	// Policies replaces the definitions in the code, request by request. Defaults to nil: the definitions decide.
	Policies Policies
	// Observer receives an event for each call. Defaults to nil: no events.
	//
	// A panic of Observe reaches the caller, whose call or transaction may have committed by then. In background work,
	// which renews and releases leases, the Limiter recovers it, drops the event and goes on.
	Observer Observer
	// Refused is called once for each bucket that refused a Take, a Reserve or an Acquire, even from the refusal cache,
	// but not for a Check. Unlike the Observer, it gets the key, so you can count refusals by key. It runs on the caller's
	// goroutine before the call returns, and on several goroutines at once. It must be quick and must not call the
	// Limiter. Defaults to nil: no call.
	//
	// Refusals in InTx are reported when the transaction has ended, even if it rolled back, but not those of an attempt
	// that lost a conflict or its connection. A refusal in a transaction that you began is reported immediately, with
	// Pending set.
	Refused func(ctx context.Context, refusal Refusal)
	// Allowed is called once for each request that an allowed Take, Reserve or Acquire made to a bucket, with the key,
	// unless the limit is Off or refused in Shadow. It runs as Refused does, but after InTx only if it committed. Defaults
	// to nil: no call, and no cost.
	Allowed func(ctx context.Context, allowance Allowance)
	// AsOf replaces the database's clock, for tests. Defaults to nil, the database's clock.
	AsOf func() time.Time
}

const (
	defaultMaxAttempts = 200
	defaultMaxWaiting  = 10_000
	defaultTimeout     = 10 * time.Second
	maxRefusalCache    = 100_000_000 // a bucket takes about 400 bytes of memory
	minSecretBytes     = 16
)

func (c Config) withDefaults() Config {
	if c.Schema == "" {
		c.Schema = store.DefaultSchema
	}
	if c.MaxWaiting == 0 {
		c.MaxWaiting = defaultMaxWaiting
	}
	if c.Timeout == 0 {
		c.Timeout = defaultTimeout
	}
	if c.MaxAttempts == 0 {
		c.MaxAttempts = defaultMaxAttempts
	}
	c.HashKey = bytes.Clone(c.HashKey) // the caller may wipe its own
	if c.ExpireAfter == 0 {
		c.ExpireAfter = Day
	}
	return c
}

func (c Config) validate() error {
	if err := arg.CheckSchema(c.Schema); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalidConfig, err)
	}
	switch {
	case c.HashKey != nil && len(c.HashKey) < minSecretBytes:
		return fmt.Errorf("%w: HashKey has %d bytes; use %d random ones or more", ErrInvalidConfig, len(c.HashKey),
			minSecretBytes)
	case c.MaxAttempts < 0:
		return fmt.Errorf("%w: MaxAttempts is %d; use 1 or more, or 0 for the default", ErrInvalidConfig, c.MaxAttempts)
	case c.MaxWaiting < 0:
		return fmt.Errorf("%w: MaxWaiting is %d; use 1 or more, or 0 for the default", ErrInvalidConfig, c.MaxWaiting)
	case c.RefusalCache < 0 || c.RefusalCache > maxRefusalCache:
		return fmt.Errorf("%w: RefusalCache is %d; use a number of buckets up to %d, or 0 for no cache", ErrInvalidConfig,
			c.RefusalCache, maxRefusalCache)
	case c.Policies != nil && arg.IsNil(c.Policies):
		return fmt.Errorf("%w: Policies holds a nil %T; pass what was made, or nothing", ErrInvalidConfig, c.Policies)
	case c.StaleAfter < 0 || c.StaleAfter > bucket.MaxSpan:
		return fmt.Errorf("%w: StaleAfter is %v; use a duration up to 100 years, or 0 for never", ErrInvalidConfig,
			c.StaleAfter)
	case c.ExpireAfter < 0 || c.ExpireAfter > bucket.MaxSpan:
		return fmt.Errorf("%w: ExpireAfter is %v; use a duration up to 100 years, or 0 for the default", ErrInvalidConfig,
			c.ExpireAfter)
	}
	return nil
}

// asOf returns the time that replaces the database's clock, in microseconds since 1970. It returns nil if AsOf is not
// set.
func (c *Config) asOf() *int64 {
	if c.AsOf == nil {
		return nil
	}
	now := clampInstant(c.AsOf().Truncate(time.Microsecond))
	return &now
}

// owner adapts a Limiter to package store.
type owner struct{ *Limiter }

// InOwnTx runs fn once on a session in a READ COMMITTED transaction of its own.
func (o owner) InOwnTx(ctx context.Context, from *store.Session, fn func(tx *store.Session) error) error {
	return inOwnTx(ctx, o.Limiter, from, func(tx *Limiter) error { return fn(&tx.session) })
}

// Once runs statement on a connection of the pool. Only a pool of pgx gives one.
func (o owner) Once(ctx context.Context, claim func() bool,
	statement func(ctx context.Context, conn store.Conn) error,
) (ran bool, err error) {
	pool, isPool := o.pool.(*pgxpool.Pool)
	if !isPool {
		return false, nil
	}
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return false, err
	}
	defer conn.Release()
	if claim != nil && !claim() {
		return false, context.Canceled
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), store.EndTimeout)
	defer cancel()
	if err = statement(ctx, conn); err != nil && !isRolledBack(err) {
		err = fmt.Errorf("%w: %w", ErrCommitUnknown, err)
	}
	return true, err
}

// Retry runs attempt again after it returned err, as long as its errors are conflicts with other transactions.
func (o owner) Retry(ctx context.Context, verb string, err error, attempt func() error) error {
	return retry(ctx, o.Limiter, verb, whenAgain(err), err, func() (again, error) {
		err := attempt()
		return whenAgain(err), err
	})
}

// Batch sends a call to the batcher, unless the Limiter is closed, or has too many calls.
func (o owner) Batch(ctx context.Context, c *store.Call) (sent bool, err error) {
	if o.pool == nil || o.batcher.IsClosed() {
		return false, nil
	}
	err = o.batcher.Do(ctx, c.Queueable())
	return !isAnyOf(err, ErrClosed, ErrOverloaded), err
}

// ClockRepaired reports a corrected row to the Observer.
func (o owner) ClockRepaired(ctx context.Context, limit string) {
	o.reports.tell(ctx, event.ClockRepaired{Limit: limit})
}

// Batched reports a batch to the Observer.
func (o owner) Batched(ctx context.Context, calls int, elapsed time.Duration) {
	if o.reports.observer != nil { // without an Observer, do not allocate the event
		o.reports.tell(ctx, event.Batched{Calls: calls, Elapsed: elapsed})
	}
}
