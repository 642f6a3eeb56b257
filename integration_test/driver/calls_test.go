package driver_test

import (
	"context"
	"database/sql"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/sqllimit"
)

// exactAtOnce has eight callers take from buckets that hold fifty, outside and in transactions of theirs.
func exactAtOnce(t *testing.T, b *bundle) {
	ctx := t.Context()
	for name, take := range map[string]func(requests ...ratelimit.Request) error{
		"outside": func(requests ...ratelimit.Request) error { return b.limiter.Require(ctx, requests...) },
		"in transactions": func(requests ...ratelimit.Request) (err error) {
			for again := true; again; again = ratelimit.IsRetryable(err) {
				err = takeInTx(ctx, b, requests)
			}
			return err
		},
	} {
		var allowed atomic.Int64
		fifty := b.fifty.For(name)
		require.NoError(t, atonce.Do(8, func(int) error {
			for {
				if err := take(fifty, b.wide.For(name), b.sliding.For(name).Cost(0.1)); errors.Is(err, ratelimit.ErrLimited) {
					return nil
				} else if err != nil {
					return err
				}
				allowed.Add(1)
			}
		}), name)
		require.EqualValues(t, 50, allowed.Load(), name)
		require.InDelta(t, 0, b.tokens(t, fifty), 1e-3, name)
		require.InDelta(t, 5, b.tokens(t, b.sliding.For(name)), 1e-3, "nothing was taken for what was refused")
	}
	require.NoError(t, b.limiter.Close(ctx))
}

// takeInTx takes in a transaction of the caller's.
func takeInTx(ctx context.Context, b *bundle, requests []ratelimit.Request) error {
	tx, err := b.db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelSerializable})
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	if err := sqllimit.WithTx(b.limiter, tx).Require(ctx, requests...); err != nil {
		return err
	}
	return tx.Commit()
}

func abortedTransaction(t *testing.T, b *bundle) {
	ctx := t.Context()
	for name, call := range map[string]func(limits *ratelimit.Limiter) error{
		"one limit":      func(limits *ratelimit.Limiter) error { return limits.Require(ctx, b.five.For("ada")) },
		"several limits": func(limits *ratelimit.Limiter) error { return limits.Require(ctx, b.five.For("ada"), b.one.For("ada")) },
		"slots":          func(limits *ratelimit.Limiter) error { _, err := limits.Acquire(ctx, b.slots.For("ada")); return err },
	} {
		tx := b.begin(t, sql.LevelDefault)
		_, err := tx.ExecContext(ctx, `SELECT 1/0`)
		require.Error(t, err, name)
		err = call(sqllimit.WithTx(b.limiter, tx))
		var ofPgx *pgconn.PgError
		require.ErrorAs(t, err, &ofPgx, name)
		require.Equal(t, "25P02", ofPgx.Code, name)
		require.False(t, ratelimit.IsRetryable(err), name)
		require.True(t, b.driver.isOwn == nil || b.driver.isOwn(err), name)
		require.NoError(t, tx.Rollback(), name)
	}
	require.InDelta(t, 5, b.tokens(t, b.five.For("ada")), 0)
}

func endedTransaction(t *testing.T, b *bundle) {
	ctx := t.Context()
	tx := b.begin(t, sql.LevelDefault)
	limits := sqllimit.WithTx(b.limiter, tx)
	require.NoError(t, limits.Require(ctx, b.five.For("ada")))
	require.NoError(t, tx.Commit())
	for range 2 {
		require.ErrorIs(t, limits.Require(ctx, b.five.For("ada"), b.one.For("ada")), sql.ErrTxDone)
		require.ErrorIs(t, sqllimit.WithTx(b.limiter, tx).Require(ctx, b.five.For("ada")), sql.ErrTxDone)
	}
	require.InDelta(t, 4, b.tokens(t, b.five.For("ada")), 1e-3)
}

// endedContext ends the context of a call that waits for a row, or the context of its transaction. Then database/sql rolls the transaction
// back, but must not use the call's connection at the same time.
func endedContext(t *testing.T, b *bundle) {
	for _, ofCall := range []bool{true, false} {
		holder := b.begin(t, sql.LevelDefault)
		require.NoError(t, sqllimit.WithTx(b.limiter, holder).Require(t.Context(), b.five.For("ada")))
		ctx, cancel := context.WithCancel(t.Context())
		ofTx, ctxOfCall := t.Context(), ctx
		if !ofCall {
			ofTx, ctxOfCall = ctx, t.Context()
		}
		tx, err := b.db.BeginTx(ofTx, nil)
		require.NoError(t, err)
		limits := sqllimit.WithTx(b.limiter, tx)
		require.NoError(t, limits.Require(t.Context(), b.fifty.For("ada")))
		done := make(chan error, 1)
		go func() { done <- limits.Require(ctxOfCall, b.five.For("ada"), b.fifty.For("ada")) }()
		b.awaitWaiting(t)
		cancel()
		if ofCall {
			require.ErrorIs(t, <-done, context.Canceled)
			hurried, err := sqllimit.New(b.db, ratelimit.Config{Timeout: time.Millisecond})
			require.NoError(t, err)
			require.ErrorIs(t, hurried.Require(t.Context(), b.five.For("ada")), context.DeadlineExceeded)
		}
		require.NoError(t, holder.Rollback())
		if !ofCall {
			require.NotErrorIs(t, <-done, ratelimit.ErrInvalidConfig) // it may have been between two statements
		}
		require.Error(t, tx.Commit(), "it can only be rolled back")
		require.InDelta(t, 50, b.tokens(t, b.fifty.For("ada")), 0)
		require.InDelta(t, 5, b.tokens(t, b.five.For("ada")), 0)
	}
	require.NoError(t, b.limiter.Require(t.Context(), b.five.For("ada")))
}

// awaitWaiting waits until a session waits for a row.
func (b *bundle) awaitWaiting(t *testing.T) {
	t.Helper()
	for waiting := 0; waiting == 0; {
		require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks WHERE NOT granted
			AND pid IN (SELECT pid FROM pg_stat_activity WHERE datname = current_database())`).Scan(&waiting))
	}
}

func noTransaction(t *testing.T, b *bundle) {
	ctx := t.Context()
	for name, limits := range map[string]*ratelimit.Limiter{
		"a *sql.DB":      sqllimit.WithTx(b.limiter, b.db),
		"nothing":        sqllimit.WithTx(b.limiter, nil),
		"a nil *sql.Tx":  sqllimit.WithTx(b.limiter, (*sql.Tx)(nil)),
		"what rewrites":  sqllimit.WithTx(b.limiter, rewriting{b.begin(t, sql.LevelDefault)}),
		"a nil *sql.Con": sqllimit.WithTx(b.limiter, (*sql.Conn)(nil)),
		"what prepares":  sqllimit.WithTx(b.limiter, preparing{b.db}),
	} {
		require.ErrorIs(t, limits.Require(ctx, b.five.For("ada"), b.one.For("ada")), ratelimit.ErrInvalidConfig, name)
		_, err := limits.Reserve(ctx, b.five.For("ada"))
		require.ErrorIs(t, err, ratelimit.ErrInvalidConfig, name)
	}
	_, err := sqllimit.New(nil, ratelimit.Config{})
	require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
	_, err = sqllimit.New(b.db, ratelimit.Config{SharedQueues: true})
	require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
	require.InDelta(t, 5, b.tokens(t, b.five.For("ada")), 0)
}

// rewriting is a transaction of a library that puts the parameters into the text.
type rewriting struct{ *sql.Tx }

// ExecContext leaves the parameters out.
func (r rewriting) ExecContext(ctx context.Context, query string, _ ...any) (sql.Result, error) {
	return r.Tx.ExecContext(ctx, query)
}

// preparing is a pool that prepares each statement, as GORM has with PrepareStmt.
type preparing struct{ *sql.DB }

// GetDBConn returns the pool.
func (p preparing) GetDBConn() (*sql.DB, error) { return p.DB, nil }

func connectionWithATransaction(t *testing.T, b *bundle) {
	ctx := t.Context()
	own, err := b.db.Conn(ctx)
	require.NoError(t, err)
	defer func() { require.NoError(t, own.Close()) }()
	limits := sqllimit.WithTx(b.limiter, own)
	for _, end := range []string{"ROLLBACK", "COMMIT"} {
		_, err = own.ExecContext(ctx, "BEGIN")
		require.NoError(t, err)
		require.NoError(t, limits.Require(ctx, b.five.For("ada"), b.one.For("ada")))
		_, err = own.ExecContext(ctx, end)
		require.NoError(t, err)
	}
	require.InDelta(t, 4, b.tokens(t, b.five.For("ada")), 1e-3)
}

// nothingIsRunTwice loses a connection while the answer to a Take is awaited: the server has ended it after the row was changed.
func nothingIsRunTwice(t *testing.T, b *bundle) {
	ctx := t.Context()
	require.NoError(t, b.limiter.Require(ctx, b.fifty.For("ada")))
	_, err := b.pool.Exec(ctx, `CREATE SEQUENCE public.attempts;
		CREATE FUNCTION public.ends() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			PERFORM nextval('public.attempts'), pg_terminate_backend(pg_backend_pid());
			RETURN NEW;
		END $$;
		CREATE TRIGGER ends BEFORE UPDATE ON ratelimit.buckets FOR EACH ROW EXECUTE FUNCTION public.ends()`)
	require.NoError(t, err)
	err = b.limiter.Require(ctx, b.fifty.For("ada"))
	require.Error(t, err)
	require.NotErrorIs(t, err, ratelimit.ErrLimited)
	var attempts int
	require.NoError(t, b.pool.QueryRow(ctx, `SELECT last_value FROM public.attempts`).Scan(&attempts))
	require.Equal(t, 1, attempts)
}
