package ratelimit

import (
	"bytes"
	"context"
	"fmt"
	"reflect"
	"regexp"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/internal/batch"
	"github.com/pgratelimit/pgratelimit/internal/bucket"
	"github.com/pgratelimit/pgratelimit/internal/store"
)

// DB is what a call needs of the database. *pgxpool.Pool, *pgxpool.Conn, *pgx.Conn and pgx.Tx have it.
type DB interface {
	Exec(ctx context.Context, sql string, arguments ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error)
	SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults
}

// Tx is what a call in a transaction needs of it: what a DB has, and the methods that tell a transaction from a pool. pgx.Tx has
// it. The Limiter of WithTx ends no transaction.
type Tx interface {
	DB
	Commit(ctx context.Context) error
	Rollback(ctx context.Context) error
}

// Pool is a DB that can begin transactions: *pgxpool.Pool, or a *pgx.Conn or *pgxpool.Conn that no one else uses
// meanwhile.
type Pool interface {
	DB
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}

// Limiter decides on requests. It is safe for concurrent use; the one that WithTx returns is for the
// transaction's goroutine, as the transaction is. Make one for a process: transactions queue only with
// those of the same Limiter, unless Config.SharedQueues is set.
type Limiter struct {
	pool         Pool // nil for a Limiter of WithTx
	hasTx        bool // whether WithTx was given a transaction
	isConnection bool // whether the pool is a single connection, which one caller at a time can use
	config       Config
	store        *store.Store
	session      store.Session // on the pool, or the transaction
	batcher      *batch.Batcher[store.Call]
	cache        *denyCache // nil: no refusal is answered from memory
	queues       *queues
	reports      reports
	policies     *policies
	fingerprint  *fingerprint
	reach        *reach
	leaving      *leaving
	prices       *prices // of adaptive limits
	prefetched   *prefetched
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
	newStore := store.New
	if store.EngineOf(pool) != nil { // of package ratelimittest, where all are of one process, and calls need no company
		config.SharedQueues, config.NoBatching, newStore = false, true, store.NewOnEngine
	}
	if config.SharedQueues && !isOfPgx(pool) {
		return nil, fmt.Errorf("%w: SharedQueues with a %T: it begins a transaction anew without the pool's BeginTx; pass a *pgxpool.Pool, "+
			"or a *pgxpool.Conn or *pgx.Conn", ErrInvalidConfig, pool)
	}
	var asOf func() *int64
	if config.AsOf != nil {
		asOf = config.asOf
	}
	l := &Limiter{
		pool: pool, isConnection: connectionOf(pool) != nil, config: config, store: newStore(config.Schema, asOf),
		cache: newDenyCache(config.DenyCache, asOf), queues: newQueues(), policies: &policies{},
		fingerprint: newFingerprint(config.HashKey), reach: newReach(), leaving: &leaving{},
	}
	l.reports = reports{observer: config.Observer, refused: config.Refused, cache: l.cache}
	l.session = l.store.OnPool(pool, owner{l})
	l.batcher = batch.New[store.Call](&l.session, batch.Options{
		Apart:      config.NoBatching || l.isConnection,
		ApartNow:   l.store.IsRouted,
		MaxWaiting: config.MaxWaiting, Timeout: config.Timeout, ErrClosed: ErrClosed, ErrOverloaded: ErrOverloaded,
	})
	background := inBackground(l)
	l.prices, l.prefetched = newPrices(background), newPrefetched(background)
	return l, nil
}

// Close lets no more calls outside of transactions in that take, look, reserve or acquire, which fail with ErrClosed from then
// on, and waits until those that are under way have been answered, or until ctx ends. What is to be ended still can
// be, with Settle, Cancel, Credit and the like, and transactions go on. It leaves the pool open. What was taken ahead, see
// TokenBucket.Prefetch, is given back. A Limiter that is not used any more needs no Close: it keeps nothing running, and gives back
// by itself within a few seconds.
func (l *Limiter) Close(ctx context.Context) error {
	if err := l.ready(context.WithoutCancel(ctx), "close"); err != nil {
		return err
	}
	if l.pool == nil {
		return fmt.Errorf("%w: close of a Limiter of WithTx; close the one that New returned", ErrInvalidConfig)
	}
	l.prefetched.shut.Store(true)
	if err := l.batcher.Close(ctx); err != nil {
		return fmt.Errorf("ratelimit: close: %w", err)
	}
	if err := l.prefetched.close(ctx); err != nil {
		return fmt.Errorf("ratelimit: close: %w", err)
	}
	if err := l.prices.close(ctx); err != nil {
		return fmt.Errorf("ratelimit: close: %w", err)
	}
	return nil
}

// Schema returns the schema of the limiter's tables.
func (l *Limiter) Schema() string { return l.config.Schema }

// InTransaction reports whether WithTx returned the Limiter.
func (l *Limiter) InTransaction() bool { return l != nil && l.pool == nil }

// Observe tells the Observer of event, when there is one: for guards that ask this Limiter, which tell what
// they [Answered].
func (l *Limiter) Observe(ctx context.Context, event Event) { l.reports.tell(ctx, event) }

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

// isNil reports whether v is nil or holds a nil pointer.
func isNil(v any) bool {
	r := reflect.ValueOf(v)
	return !r.IsValid() || r.Kind() == reflect.Pointer && r.IsNil()
}

// Config is how a Limiter works. The zero Config is ready for use.
type Config struct {
	// Schema is the schema that migrations.Up made the table in. Defaults to "ratelimit".
	Schema string
	// HashKey, when set, is a secret under which keys are stored as their HMAC-SHA-256 (base64url), so that
	// the table holds no personal data and keys may be of any bytes, up to 64 KiB. 16 bytes at least.
	//
	// All programs on a schema have the same, or none. A fingerprint of it is in the table fingerprint, and calls of a
	// program with another return ErrHashKeyMismatch; see docs/operations.md. A program compares again after a call
	// returned ErrNotMigrated. Restart programs that ran, but made no call, while you made the tables anew or restored them.
	HashKey []byte
	// MaxAttempts bounds how often InTx, and a call outside a transaction, is run when it conflicts with
	// other transactions. Waits for rows that they hold do not count. Defaults to 200.
	MaxAttempts int
	// Timeout bounds each call outside a transaction, with its attempts and the wait for a connection, when its context
	// does not end sooner: a call waits for a row that a transaction holds as long as that is open. The error of a call
	// whose time has ended is context.DeadlineExceeded to errors.Is; whether it took anything is then unknown. Of Prune
	// and Expire it bounds each transaction. InTx, which runs a function of yours, and calls in transactions have the
	// time of their contexts. A COMMIT that has been sent may take five seconds more. A batch looks at the clock only
	// so often: its calls end up to a sixteenth later. Defaults to 10 seconds; below 0 there is no bound.
	//
	// The statement of a call that has ended is cancelled. A cancel request that reaches the server before the
	// statement does nothing, so that it may go on to wait for its row; with client_connection_check_interval set
	// (Postgres 14, in the pool's RuntimeParams) the server ends it all the same.
	Timeout time.Duration
	// StaleAfter is how long after ReadyAt a reservation's work may start and still use its slot; see
	// Limiter.Start. Defaults to 0: for ever.
	StaleAfter time.Duration
	// ExpireAfter is how long after ReadyAt a reservation may stay open until Limiter.Expire ends it.
	// Defaults to 24 hours.
	ExpireAfter time.Duration
	// ReleaseExpired makes reservations that expire give back what they took. Defaults to false: they keep
	// it, because the work may well have run without its process living to settle.
	ReleaseExpired bool
	// NoBatching runs each call outside a transaction as a statement of its own. Defaults to false: calls
	// that are made at the same time are folded into one statement, which runs with the values of the first
	// one's context. A batch for one bucket waits for its row; one for more waits for
	// no row that somebody holds, and a call that needs such a row waits by itself.
	NoBatching bool
	// MaxWaiting bounds the calls outside a transaction that wait for their turn in a batch. More fail with ErrOverloaded. Calls behind
	// rows that are held for longer are counted apart: at most MaxWaiting, and half of it behind one row. Defaults to 10,000.
	MaxWaiting int
	// SharedQueues makes the queues of InTx those of all processes that set it, for buckets that many processes want at once:
	// transactions of one bucket take turns from their first conflict on, instead of failing one another. Defaults to
	// false: those of this Limiter queue, and meet those of other processes.
	//
	// Whoever waits does so in the server, for an advisory lock that his transaction then holds to its end, one at a time of
	// each process; a second later he goes on without. The statement that takes from the bucket has to be the first of its
	// transaction, or [WithQueue] to name the bucket: to wait, the transaction is ended while it is empty, and begun again on
	// its connection. So New takes no pool but those of pgx, whose BeginTx does nothing else. It works through a pooler in
	// transaction mode, such as PgBouncer, as calls do: see ErrPoolerMode.
	SharedQueues bool
	// DenyCache is how many buckets are remembered that refused a Take outside a transaction, so that the next
	// that asks for as much is refused from memory until its wait is over, without a round trip. Up to 64 are
	// remembered by any cache, and 100 million at most. Defaults to 0: no cache.
	//
	// What is taken from a bucket or given back to it through this Limiter, in transactions of InTx with their
	// commit, and a changed policy, show at once. What other processes do, and transactions that this Limiter did not
	// begin, shows within a second: until then a call may be refused although tokens were given back, and its
	// RetryAfter and Remaining do not know of what was taken, so that who comes back in time may be refused again.
	// Of a call over several limits the same holds for what it says of those that did not refuse.
	DenyCache int
	// Policies is asked for the policy of each request, in place of the one that its limit is defined with. Defaults to
	// nil: the definitions in the code decide.
	Policies Policies
	// Observer is told what the calls did. Defaults to nil, nobody.
	//
	// A panic of Observe reaches the caller, except in background work. The call, or the transaction of InTx, may have committed
	// by then. In background work the Limiter recovers the panic and drops the event, and the work goes on. Background work takes
	// tokens ahead and gives them back (TokenBucket.Prefetch), exchanges prices (Adaptive), and renews and releases leases.
	Observer Observer
	// Refused is told of each bucket that refused a Take or a Reserve, once a call, those among them that were answered
	// from the deny cache; a Check is not told. It is for counting who was refused, and unlike the Observer it hears the
	// key. It runs on the caller's goroutine before the call returns: it must be quick, must not call the Limiter, and may
	// run on many goroutines at once. Defaults to nil, nobody.
	//
	// Refusals in a transaction of InTx are reported when the transaction has ended, also when it rolled back; those of an attempt that
	// lost a conflict or its connection are not. A refusal in a transaction that you began is reported at once, with Pending set.
	Refused func(ctx context.Context, refusal Refusal)
	// AsOf replaces the database's clock, for tests. Defaults to nil, the database's clock.
	AsOf func() time.Time
}

const (
	defaultMaxAttempts = 200
	defaultMaxWaiting  = 10_000
	defaultTimeout     = 10 * time.Second
	maxDenyCache       = 100_000_000 // what memory holds, some 400 bytes each
	minSecretBytes     = 16
)

var validSchema = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,62}$`)

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
	switch {
	case !validSchema.MatchString(c.Schema):
		return fmt.Errorf("%w: Schema %.80q: use a lower-case letter or _, then up to 62 of a-z, 0-9 and _", ErrInvalidConfig, c.Schema)
	case c.HashKey != nil && len(c.HashKey) < minSecretBytes:
		return fmt.Errorf("%w: HashKey has %d bytes; use %d random ones or more", ErrInvalidConfig, len(c.HashKey), minSecretBytes)
	case c.MaxAttempts < 0:
		return fmt.Errorf("%w: MaxAttempts is %d; use 1 or more, or 0 for the default", ErrInvalidConfig, c.MaxAttempts)
	case c.MaxWaiting < 0:
		return fmt.Errorf("%w: MaxWaiting is %d; use 1 or more, or 0 for the default", ErrInvalidConfig, c.MaxWaiting)
	case c.DenyCache < 0 || c.DenyCache > maxDenyCache:
		return fmt.Errorf("%w: DenyCache is %d; use a number of buckets up to %d, or 0 for no cache", ErrInvalidConfig, c.DenyCache, maxDenyCache)
	case c.Policies != nil && isNil(c.Policies):
		return fmt.Errorf("%w: Policies holds a nil %T; pass what was made, or nothing", ErrInvalidConfig, c.Policies)
	case c.StaleAfter < 0 || c.StaleAfter > bucket.MaxSpan:
		return fmt.Errorf("%w: StaleAfter is %v; use a span up to 100 years, or 0 for never", ErrInvalidConfig, c.StaleAfter)
	case c.ExpireAfter < 0 || c.ExpireAfter > bucket.MaxSpan:
		return fmt.Errorf("%w: ExpireAfter is %v; use a span up to 100 years, or 0 for the default", ErrInvalidConfig, c.ExpireAfter)
	}
	return nil
}

// asOf returns what replaces the database's clock, in microseconds since 1970: nil unless a test set one.
func (c *Config) asOf() *int64 {
	if c.AsOf == nil {
		return nil
	}
	now := clampInstant(c.AsOf().Truncate(time.Microsecond))
	return &now
}
