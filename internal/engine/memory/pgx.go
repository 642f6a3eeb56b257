package memory

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/pgratelimit/internal/engine/store"
)

// ErrNoDatabase is the error of SQL without a database.
var ErrNoDatabase = errors.New("ratelimittest: there is no database, so no SQL can run here; give NewDBWith or " +
	"OpenSQL one, which may be a " +
	"mock, or test with a Postgres, as package ratelimittest/postgres starts it")

// Statements run SQL: a pool or a transaction.
type Statements interface {
	Exec(ctx context.Context, sql string, arguments ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error)
	SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults
}

// SQL is a database for the statements of the application.
type SQL interface {
	Statements
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}

// Pool is a DB as a Limiter needs it: a pool that runs SQL in another database, if there is one.
type Pool struct {
	Statements
	db  *DB
	sql SQL // nil: there is none
}

// NewPool returns a pool of a new DB. sql may be nil.
func NewPool(sql SQL) Pool {
	p := Pool{Statements: nothing{}, db: New(), sql: sql}
	if sql != nil {
		p.Statements = sql
	}
	return p
}

// Engine returns the Engine for calls outside a transaction.
func (p Pool) Engine() store.Ledgers { return &Tx{DB: p.db, alone: true} }

// Count returns the number of rows of buckets.
func (p Pool) Count() int {
	p.db.mu.Lock()
	defer p.db.mu.Unlock()
	return len(p.db.buckets)
}

// Begin begins a transaction.
func (p Pool) Begin(ctx context.Context) (pgx.Tx, error) { return p.BeginTx(ctx, pgx.TxOptions{}) }

// BeginTx begins a transaction, in the other database too if there is one. The options are for the other database.
func (p Pool) BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error) {
	switch {
	case p.sql != nil:
		begun, err := p.sql.BeginTx(ctx, options)
		if err != nil {
			return nil, err
		}
		return &pgxTx{Tx: begun, tx: p.db.Begin()}, nil
	case ctx.Err() != nil:
		return nil, fmt.Errorf("begin: %w", ctx.Err())
	}
	return &pgxTx{Tx: nothing{}, tx: p.db.Begin()}, nil
}

// pgxTx is a pgx transaction, or a nested transaction in it.
type pgxTx struct {
	pgx.Tx // the other database's, or nothing

	tx       *Tx
	isNested bool
	before   mark // of a nested one: where it began
	ended    bool
}

// Engine returns the transaction as the store has it.
func (p *pgxTx) Engine() store.Ledgers { return p.tx }

// Begin begins a nested transaction.
func (p *pgxTx) Begin(ctx context.Context) (pgx.Tx, error) {
	if err := p.tx.enter(); err != nil {
		p.tx.leave()
		return nil, err
	}
	before := p.tx.mark()
	p.tx.leave()
	begun, err := p.Tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	return &pgxTx{Tx: begun, tx: p.tx, isNested: true, before: before}, nil
}

// Commit commits in the other database first. If that fails, nothing is kept here.
func (p *pgxTx) Commit(ctx context.Context) error {
	if p.ended {
		return pgx.ErrTxClosed
	}
	p.ended = true
	if !p.isNested && p.tx.isFailed() { // as a COMMIT of a failed transaction
		return errors.Join(pgx.ErrTxCommitRollback, p.Tx.Rollback(ctx), p.tx.rollback())
	}
	err := p.Tx.Commit(ctx)
	switch {
	case p.isNested:
		return err
	case err != nil:
		return errors.Join(err, p.tx.rollback())
	}
	return p.tx.commit()
}

// Rollback rolls back in both.
func (p *pgxTx) Rollback(ctx context.Context) error {
	if p.ended {
		return pgx.ErrTxClosed
	}
	p.ended = true
	err := p.Tx.Rollback(ctx)
	if p.isNested {
		return errors.Join(err, p.tx.backTo(p.before))
	}
	return errors.Join(err, p.tx.rollback())
}

// nothing is a transaction of no database.
type nothing struct{}

var _ pgx.Tx = nothing{}

func (nothing) Begin(context.Context) (pgx.Tx, error) { return nothing{}, nil }
func (nothing) Commit(context.Context) error          { return nil }
func (nothing) Rollback(context.Context) error        { return nil }
func (nothing) Conn() *pgx.Conn                       { return nil }
func (nothing) LargeObjects() pgx.LargeObjects        { return pgx.LargeObjects{} }

func (nothing) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, ErrNoDatabase
}

func (nothing) Query(context.Context, string, ...any) (pgx.Rows, error) {
	return noRows{}, ErrNoDatabase
}
func (nothing) QueryRow(context.Context, string, ...any) pgx.Row { return noRows{} }
func (nothing) SendBatch(_ context.Context, batch *pgx.Batch) pgx.BatchResults {
	return pgx.FailedBatchResults(batch, ErrNoDatabase)
}

func (nothing) Prepare(context.Context, string, string) (*pgconn.StatementDescription, error) {
	return nil, ErrNoDatabase
}

func (nothing) CopyFrom(context.Context, pgx.Identifier, []string, pgx.CopyFromSource) (int64, error) {
	return 0, ErrNoDatabase
}

// noRows is what a query of no database answers.
type noRows struct{}

func (noRows) Close()                                       {}
func (noRows) Err() error                                   { return ErrNoDatabase }
func (noRows) CommandTag() pgconn.CommandTag                { return pgconn.CommandTag{} }
func (noRows) FieldDescriptions() []pgconn.FieldDescription { return nil }
func (noRows) Next() bool                                   { return false }
func (noRows) Scan(...any) error                            { return ErrNoDatabase }
func (noRows) Values() ([]any, error)                       { return nil, ErrNoDatabase }
func (noRows) RawValues() [][]byte                          { return nil }
func (noRows) TypeMap() *pgtype.Map                         { return nil }
func (noRows) Conn() *pgx.Conn                              { return nil }
