// Package store keeps buckets and reservations in Postgres: it locks rows, reads them and saves them, and it has the
// statements that decide by themselves. Package bucket is the algebra that it decides with.
//
// A Session is the store on one connection pool or in one transaction. It begins no transaction, and does not make an
// attempt again that failed in a conflict. It asks its Owner to, as what becomes of a transaction is not for the store to
// say.
package store

import (
	"context"
	"math/rand/v2"
	"reflect"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/internal/bucket"
)

// DefaultSchema is the schema that the statements are written for.
const DefaultSchema = "ratelimit"

// Conn is what a Session needs of the database: a pool, a connection or a transaction.
type Conn interface {
	Exec(ctx context.Context, sql string, arguments ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error)
	SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults
}

// Owner is who a Session works for.
type Owner interface {
	// InOwnTx runs fn once on a session in a new READ COMMITTED transaction, which it commits unless fn fails.
	InOwnTx(ctx context.Context, from *Session, fn func(tx *Session) error) error
	// Retry runs attempt after one that ended with err, when that was because of others, and again while it is.
	Retry(ctx context.Context, verb string, err error, attempt func() error) error
	// Mended is told that a row of the limit was written by a clock that was wrong, and is put right.
	Mended(ctx context.Context, limit string)
	// Batched is told that a statement for several calls was answered.
	Batched(ctx context.Context, calls int, elapsed time.Duration)
}

// Queue makes the transactions of a process that want one bucket go one after the other.
type Queue interface {
	// Enter is called before the first statement that locks the rows.
	Enter(ctx context.Context, rows []bucket.Ask)
}

// Store is what the sessions of one schema share.
type Store struct {
	schema     string
	statements statements
	limits     limitParameters
	bold       boldness
	calendars  calendars
	asOf       func() *int64 // the instant that replaces the database's clock; nil: nothing does
	onEngine   bool          // whether rows are on an Engine, and not in Postgres
	layout     atomic.Int32  // of the tables, as far as that is known
}

// New returns the store in a schema. asOf returns the instant that replaces the database's clock; nil when nothing does.
func New(schema string, asOf func() *int64) *Store {
	return &Store{schema: schema, statements: newStatements(schema), asOf: asOf}
}

// NewOnEngine is New for rows on an Engine, which needs no statements.
func NewOnEngine(schema string, asOf func() *int64) *Store {
	return &Store{schema: schema, asOf: asOf, onEngine: true}
}

// retry runs a statement that is its own transaction, again when it conflicts with others. In a transaction it runs it
// once: only the owner of the transaction can run it again.
func (s *Session) retry(ctx context.Context, verb string, statement func() error) error {
	err := statement()
	if err == nil || s.mode != alone {
		return err
	}
	return s.owner.Retry(ctx, verb, err, statement)
}

// ensureTx runs fn in a transaction: the one that the session is of, else one of its own.
func (s *Session) ensureTx(ctx context.Context, fn func(tx *Session) error) error {
	if s.mode != alone {
		return fn(s)
	}
	return s.owner.InOwnTx(ctx, s, fn)
}

// retryTx is ensureTx, and runs a transaction of its own again when it conflicts with others.
func (s *Session) retryTx(ctx context.Context, verb string, fn func(tx *Session) error) error {
	if s.mode != alone {
		return s.OrSpoil(ctx, fn(s))
	}
	err := s.owner.InOwnTx(ctx, s, fn)
	if err == nil {
		return nil
	}
	return s.owner.Retry(ctx, verb, err, func() error { return s.owner.InOwnTx(ctx, s, fn) })
}

// seed returns the number that the rows of sharded buckets are picked by: a random one, but the same for all calls of a
// transaction and all attempts of one that queues. So a transaction that takes from a bucket twice returns to the row it
// has locked, and does not wait for another that does the same; and one that is made again, to the queue it is in.
func (s *Session) seed() uint64 {
	var owner any = s.conn
	if c, ok := owner.(interface{ Identity() any }); ok { // one of several that stand for the transaction
		owner = c.Identity()
	}
	if s.queue != nil {
		owner = s.queue
	}
	if v := reflect.ValueOf(owner); s.mode != alone && v.Kind() == reflect.Pointer {
		return rand.NewPCG(uint64(v.Pointer()), 0).Uint64()
	}
	return rand.Uint64()
}

// send sends batch, and has receive read the answers.
func (s *Session) send(ctx context.Context, batch *pgx.Batch, receive func(pgx.BatchResults) error) (err error) {
	results := s.conn.SendBatch(ctx, batch)
	defer func() {
		if closeErr := results.Close(); err == nil {
			err = closeErr
		}
	}()
	return receive(results)
}
