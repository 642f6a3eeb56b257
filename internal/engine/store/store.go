// Package store keeps buckets in Postgres. It locks, reads and saves rows, and runs the statements that decide. Package
// bucket has the algebra.
//
// A Session is the store on a pool or in a transaction. Its Owner begins transactions, and runs attempts again after a
// conflict.
package store

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/internal/engine/bucket"
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
	// Once runs statement on a connection of its own, as a transaction of its own that is not cancelled, and returns an
	// error that says so if it's unknown whether that has committed. claim is called when the connection is there; if it
	// returns false, nothing runs, and the error is context.Canceled. ran is false if the Owner can't do that.
	Once(ctx context.Context, claim func() bool,
		statement func(ctx context.Context, conn Conn) error) (ran bool, err error)
	// Retry runs attempt again after an attempt that ended with err, while the cause is a conflict with other
	// transactions.
	Retry(ctx context.Context, verb string, err error, attempt func() error) error
	// ClockRepaired reports a row of the limit that a wrong clock had written, and that was corrected.
	ClockRepaired(ctx context.Context, limit string)
	// Batched reports a statement for several calls.
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
	others     sync.Map // of the texts of statements of other packages, by their names
	relaxed    bool
	asOf       func() *int64 // the instant that replaces the database's clock; nil: nothing does
	inMemory   bool          // whether rows are in memory, and not in Postgres
	layout     atomic.Int32  // of the tables, as far as that is known
}

// Options are the settings of a Store.
type Options struct {
	Schema string
	AsOf   func() *int64 // the instant that replaces the database's clock; nil: none does
	// whether calls in transactions of their own, which keep no record, return before their commits are on disk
	RelaxedCommit bool
}

// New returns a Store.
func New(o Options) *Store {
	return &Store{
		schema: o.Schema, statements: newStatements(o.Schema), relaxed: o.RelaxedCommit, asOf: o.AsOf,
	}
}

// NewInMemory is New for rows in memory, which needs no statements.
func NewInMemory(o Options) *Store {
	s := &Store{schema: o.Schema, asOf: o.AsOf, inMemory: true}
	s.layout.Store(layoutPlain) // there is nothing to learn
	return s
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

// ensureTx runs fn in a transaction: in the session's, or else in one of its own.
func (s *Session) ensureTx(ctx context.Context, fn func(tx *Session) error) error {
	if s.mode != alone {
		return fn(s)
	}
	return s.owner.InOwnTx(ctx, s, fn)
}

// RetryTx is ensureTx, and runs a transaction of its own again when it conflicts with others.
func (s *Session) RetryTx(ctx context.Context, verb string, fn func(tx *Session) error) error {
	if s.mode != alone {
		return s.OrSpoil(ctx, fn(s))
	}
	err := s.owner.InOwnTx(ctx, s, fn)
	if err == nil {
		return nil
	}
	return s.owner.Retry(ctx, verb, err, func() error { return s.owner.InOwnTx(ctx, s, fn) })
}
