package ratelimittest

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/internal/engine/memory"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// ErrNoDatabase is the error of SQL that a test executes in a transaction, or on a DB, where there is no database.
var ErrNoDatabase = memory.ErrNoDatabase

// pool has the methods of a DB.
type pool = memory.Pool

// DB is a [ratelimit.Pool] in memory. Pass it to New of package ratelimit, with a Config of the test's own. Several
// Limiters of one DB behave like several processes on one database. It is safe for concurrent use. Make it with
// [NewDB].
type DB struct{ pool }

// SQL is the database of a test for everything but limits: a *pgxpool.Pool, or what plays one.
type SQL interface {
	Exec(ctx context.Context, sql string, arguments ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error)
	SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}

// NewDB returns a DB in which every bucket is full.
func NewDB() *DB { return &DB{memory.NewPool(nil)} }

// NewDBWith returns a DB that pairs its transactions with sql's: statements of the code under test run there, and both
// commit and roll back together. The limits stay in memory.
func NewDBWith(sql SQL) *DB { return &DB{memory.NewPool(sql)} }

// Begin begins a transaction for code that is given one; [ratelimit.Limiter.WithTx] of a Limiter of the DB takes it.
// Its SQL fails with [ErrNoDatabase], unless NewDBWith made the DB.
func (db *DB) Begin(ctx context.Context) (pgx.Tx, error) { return db.pool.Begin(ctx) }

// OpenSQL returns a *sql.DB for code over database/sql. It pairs each transaction of db with a transaction of rows:
// statements of the code under test run there, and both commit and roll back together. rows is any *sql.DB, for example
// a mock. If rows is nil, SQL fails with [ErrNoDatabase]. The calls of sqllimit.WithTx are part of such a transaction,
// and a ROLLBACK TO a savepoint undoes them too. Pass the *sql.DB itself to sqllimit.New.
//
// Statements reach rows when they are executed: a prepared statement is not prepared there, and transactions that SQL
// begins are not known here. Close both.
func (db *DB) OpenSQL(rows *sql.DB) *sql.DB { return db.pool.OpenSQL(rows) }

// New returns a Limiter in memory that is on clock's time. A nil clock means the real time, or the bubble's time in a
// test of package synctest. Every bucket is full. The Limiter is for this test alone and is closed when the test ends,
// which finds calls that are still running. For another [ratelimit.Config], pass a DB to New of package ratelimit.
func New(t testing.TB, clock *Clock) *ratelimit.Limiter {
	t.Helper()
	var config ratelimit.Config
	if clock != nil {
		config.AsOf = clock.Now
	}
	limiter, err := ratelimit.New(NewDB(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), closeTimeout)
		defer cancel()
		if err := limiter.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return limiter
}

// closeTimeout is how long a test may take to end the calls that it left running.
const closeTimeout = 10 * time.Second
