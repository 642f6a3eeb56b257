package ratelimit

import (
	"context"
	"fmt"
	"reflect"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/internal/batch"
	"github.com/pgratelimit/pgratelimit/internal/store"
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
	var asOf func() *int64
	if config.AsOf != nil {
		asOf = config.asOf
	}
	l := &Limiter{
		pool: pool, isConnection: connectionOf(pool) != nil, config: config, store: store.New(config.Schema, asOf),
		cache: newDenyCache(config.DenyCache, asOf), queues: newQueues(), policies: &policies{},
		fingerprint: newFingerprint(config.HashKey),
	}
	l.reports = reports{observer: config.Observer, refused: config.Refused, cache: l.cache}
	l.session = l.store.OnPool(pool, owner{l})
	l.batcher = batch.New[store.Call](&l.session, batch.Options{
		Apart:      config.NoBatching || l.isConnection,
		MaxWaiting: config.MaxWaiting, Timeout: config.Timeout, ErrClosed: ErrClosed, ErrOverloaded: ErrOverloaded,
	})
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

// InTransaction reports whether WithTx returned the Limiter.
func (l *Limiter) InTransaction() bool { return l != nil && l.pool == nil }

// Observe tells the Observer of event, when there is one: for guards that ask this Limiter, which tell what
// they [Answered].
func (l *Limiter) Observe(ctx context.Context, event Event) { l.reports.tell(ctx, event) }

// isNil reports whether v is nil or holds a nil pointer.
func isNil(v any) bool {
	r := reflect.ValueOf(v)
	return !r.IsValid() || r.Kind() == reflect.Pointer && r.IsNil()
}
