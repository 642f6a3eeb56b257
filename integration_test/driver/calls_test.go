package driver_test

import (
	"context"
	"database/sql"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/sqllimit"
)

const (
	callers  = 8
	each     = 25
	capacity = 50
)

// crowd has each of the callers call so often, and returns how many calls were allowed.
func crowd(t *testing.T, call func(ctx context.Context) (bool, error)) int {
	t.Helper()
	var allowed atomic.Int64
	var all sync.WaitGroup
	for range callers {
		all.Go(func() {
			for range each {
				ok, err := call(t.Context())
				if err != nil {
					t.Error(err)
					return
				}
				if ok {
					allowed.Add(1)
				}
			}
		})
	}
	all.Wait()
	return int(allowed.Load())
}

func exactInTransactions(t *testing.T, b *bundle) {
	for _, level := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
		request := b.fifty.For(level.String())
		allowed := crowd(t, func(ctx context.Context) (bool, error) {
			for {
				ok, err := takeOnce(ctx, b, level, request)
				if err == nil || !ratelimit.IsRetryable(err) {
					return ok, err
				}
			}
		})
		require.Equal(t, capacity, allowed, level)
		require.InDelta(t, 0, b.tokens(t, request), 1e-3, level)
	}
}

// takeOnce takes in a transaction of the caller's.
func takeOnce(ctx context.Context, b *bundle, level sql.IsolationLevel, request ratelimit.Request) (bool, error) {
	tx, err := b.db.BeginTx(ctx, &sql.TxOptions{Isolation: level})
	if err != nil {
		return false, err
	}
	defer func() { _ = tx.Rollback() }()
	d, err := sqllimit.WithTx(b.limiter, tx).Take(ctx, request)
	if err != nil || !d.Allowed {
		return false, err
	}
	return true, tx.Commit()
}

func exactOutsideTransactions(t *testing.T, b *bundle) {
	one, several := b.fifty.For("one"), []ratelimit.Request{b.fifty.For("a"), b.wide.For("b"), b.sliding.For("c").Cost(0.1)}
	require.Equal(t, capacity, crowd(t, func(ctx context.Context) (bool, error) {
		d, err := b.limiter.Take(ctx, one)
		return d.Allowed, err
	}))
	require.Equal(t, capacity, crowd(t, func(ctx context.Context) (bool, error) {
		d, err := b.limiter.Take(ctx, several...)
		return d.Allowed, err
	}))
	require.InDelta(t, 5, b.tokens(t, several[2]), 1e-3, "nothing was taken for what was refused")
	require.NoError(t, b.limiter.Close(t.Context()))
}

func exactOverShards(t *testing.T, b *bundle) {
	require.Equal(t, capacity, crowd(t, func(ctx context.Context) (bool, error) {
		for {
			ok, err := takeOnce(ctx, b, sql.LevelReadCommitted, b.wide.For("ada"))
			if err == nil || !ratelimit.IsRetryable(err) {
				return ok, err
			}
		}
	}))
}

func rollbackGivesBack(t *testing.T, b *bundle) {
	ctx := t.Context()
	tx := b.begin(t, sql.LevelDefault)
	limits := sqllimit.WithTx(b.limiter, tx)
	d, err := limits.Take(ctx, b.five.For("ada").Cost(3), b.windows.For("ada"), b.sliding.For("ada"))
	require.NoError(t, err)
	require.True(t, d.Allowed)
	v, err := limits.Value(ctx, b.five.For("ada"))
	require.NoError(t, err)
	require.InDelta(t, 2, v.Tokens, 1e-3, "the transaction sees what it took")
	require.NoError(t, tx.Rollback())
	require.InDelta(t, 5, b.tokens(t, b.five.For("ada")), 0)
	require.InDelta(t, 10, b.tokens(t, b.windows.For("ada")), 0)
	require.InDelta(t, 10, b.tokens(t, b.sliding.For("ada")), 0)
}

func severalLimitsAllOrNothing(t *testing.T, b *bundle) {
	ctx := t.Context()
	tx := b.begin(t, sql.LevelDefault)
	limits := sqllimit.WithTx(b.limiter, tx)
	both := []ratelimit.Request{b.five.For("ada"), b.one.For("ada")}
	d, err := limits.Take(ctx, both...)
	require.NoError(t, err)
	require.True(t, d.Allowed)
	d, err = limits.Take(ctx, both...)
	require.NoError(t, err)
	require.False(t, d.Allowed)
	require.Positive(t, d.RetryAfter)
	require.NoError(t, tx.Commit())
	require.InDelta(t, 4, b.tokens(t, b.five.For("ada")), 1e-3)
	require.InDelta(t, 0, b.tokens(t, b.one.For("ada")), 1e-3)
}

func refusalLeavesUsable(t *testing.T, b *bundle) {
	ctx := t.Context()
	for name, requests := range map[string][]ratelimit.Request{
		"one limit":       {b.one.For("ada")},
		"several limits":  {b.one.For("bob"), b.five.For("bob")},
		"several shards":  {b.wide.For("ada").Cost(50), b.five.For("eve")},
		"a slidingwindow": {b.sliding.For("ada").Cost(10)},
		"a calendar":      {b.days.For("ada").Cost(10)},
	} {
		tx := b.begin(t, sql.LevelSerializable)
		limits := sqllimit.WithTx(b.limiter, tx)
		for _, want := range []bool{true, false} {
			d, err := limits.Take(ctx, requests...)
			require.NoError(t, err, name)
			require.Equal(t, want, d.Allowed, name)
		}
		_, err := tx.ExecContext(ctx, `INSERT INTO public.messages (author) VALUES ($1)`, name)
		require.NoError(t, err, name)
		require.NoError(t, tx.Commit(), name)
	}
	require.Equal(t, 5, b.messages(t))
}

func badInputLeavesUsable(t *testing.T, b *bundle) {
	ctx := t.Context()
	tx := b.begin(t, sql.LevelDefault)
	limits := sqllimit.WithTx(b.limiter, tx)
	_, err := limits.Take(ctx, b.five.For(""))
	require.ErrorIs(t, err, ratelimit.ErrInvalidKey)
	_, err = limits.Take(ctx, b.five.For("ada").Cost(6))
	require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity)
	require.ErrorIs(t, limits.Cancel(ctx, "3fa85f64-5717-4562-b3fc-2c963f66afa6"), ratelimit.ErrNotReserved)
	require.ErrorIs(t, limits.Release(ctx, "nonsense"), ratelimit.ErrInvalidLease)
	d, err := limits.Take(ctx, b.five.For(`a'da "\{},$1`+"é"))
	require.NoError(t, err)
	require.True(t, d.Allowed)
	require.NoError(t, tx.Commit())
	require.InDelta(t, 4, b.tokens(t, b.five.For(`a'da "\{},$1`+"é")), 1e-3)
}

func savepointOfTheCaller(t *testing.T, b *bundle) {
	ctx := t.Context()
	tx := b.begin(t, sql.LevelDefault)
	limits := sqllimit.WithTx(b.limiter, tx)
	take := func() {
		d, err := limits.Take(ctx, b.five.For("ada"), b.fifty.For("ada"))
		require.NoError(t, err)
		require.True(t, d.Allowed)
	}
	take()
	for _, statement := range []string{"SAVEPOINT mine", "", "ROLLBACK TO SAVEPOINT mine"} {
		if statement == "" {
			take()
			continue
		}
		_, err := tx.ExecContext(ctx, statement)
		require.NoError(t, err)
	}
	require.NoError(t, tx.Commit())
	require.InDelta(t, 4, b.tokens(t, b.five.For("ada")), 1e-3)
}

func abortedTransaction(t *testing.T, b *bundle) {
	ctx := t.Context()
	for name, requests := range map[string][]ratelimit.Request{
		"one limit": {b.five.For("ada")}, "several limits": {b.five.For("ada"), b.one.For("ada")}, "slots": {b.slots.For("ada")},
	} {
		tx := b.begin(t, sql.LevelDefault)
		limits := sqllimit.WithTx(b.limiter, tx)
		_, err := tx.ExecContext(ctx, `SELECT 1/0`)
		require.Error(t, err, name)
		if name == "slots" {
			_, err = limits.Acquire(ctx, requests...)
		} else {
			_, err = limits.Take(ctx, requests...)
		}
		var ofPgx *pgconn.PgError
		require.ErrorAs(t, err, &ofPgx, name)
		require.Equal(t, "25P02", ofPgx.Code, name)
		require.False(t, ratelimit.IsRetryable(err), name)
		var ofDriver interface{ SQLState() string }
		require.ErrorAs(t, err, &ofDriver, name)
		require.NoError(t, tx.Rollback(), name)
	}
	require.InDelta(t, 5, b.tokens(t, b.five.For("ada")), 0)
}

func endedTransaction(t *testing.T, b *bundle) {
	ctx := t.Context()
	tx := b.begin(t, sql.LevelDefault)
	limits := sqllimit.WithTx(b.limiter, tx)
	_, err := limits.Take(ctx, b.five.For("ada"))
	require.NoError(t, err)
	require.NoError(t, tx.Commit())
	for range 2 {
		_, err = limits.Take(ctx, b.five.For("ada"), b.one.For("ada"))
		require.ErrorIs(t, err, sql.ErrTxDone)
		_, err = sqllimit.WithTx(b.limiter, tx).Take(ctx, b.five.For("ada"))
		require.ErrorIs(t, err, sql.ErrTxDone)
	}
	require.InDelta(t, 4, b.tokens(t, b.five.For("ada")), 1e-3)
}

func endedContext(t *testing.T, b *bundle) {
	holder := b.begin(t, sql.LevelDefault)
	_, err := sqllimit.WithTx(b.limiter, holder).Take(t.Context(), b.five.For("ada"))
	require.NoError(t, err)

	tx := b.begin(t, sql.LevelDefault)
	limits := sqllimit.WithTx(b.limiter, tx)
	d, err := limits.Take(t.Context(), b.fifty.For("ada"))
	require.NoError(t, err)
	require.True(t, d.Allowed)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		_, err := limits.Take(ctx, b.five.For("ada"))
		done <- err
	}()
	b.awaitWaiting(t)
	cancel()
	err = <-done
	require.ErrorIs(t, err, context.Canceled)

	hurried, err := sqllimit.New(b.db, ratelimit.Config{Timeout: time.Millisecond})
	require.NoError(t, err)
	_, err = hurried.Take(t.Context(), b.five.For("ada"))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NoError(t, holder.Rollback())
	require.Error(t, tx.Commit(), "it can only be rolled back")
	require.InDelta(t, 50, b.tokens(t, b.fifty.For("ada")), 0)
	require.InDelta(t, 5, b.tokens(t, b.five.For("ada")), 0)
}

// endOfTheTransactionsContext ends the context of a transaction while a call of it waits for a row. database/sql rolls the
// transaction back, but must not use the call's connection at the same time.
func endOfTheTransactionsContext(t *testing.T, b *bundle) {
	holder := b.begin(t, sql.LevelDefault)
	_, err := sqllimit.WithTx(b.limiter, holder).Take(t.Context(), b.five.For("ada"))
	require.NoError(t, err)

	ctx, cancel := context.WithCancel(t.Context())
	tx, err := b.db.BeginTx(ctx, nil)
	require.NoError(t, err)
	limits := sqllimit.WithTx(b.limiter, tx)
	done := make(chan error)
	go func() {
		_, err := limits.Take(t.Context(), b.five.For("ada"), b.fifty.For("ada"))
		done <- err
	}()
	b.awaitWaiting(t)
	cancel()
	require.NoError(t, holder.Rollback())
	if err := <-done; err != nil { // it may have been between two statements
		require.NotErrorIs(t, err, ratelimit.ErrInvalidConfig)
	}
	require.Error(t, tx.Commit())
	require.InDelta(t, 50, b.tokens(t, b.fifty.For("ada")), 0)
	require.InDelta(t, 5, b.tokens(t, b.five.For("ada")), 0)
	d, err := b.limiter.Take(t.Context(), b.five.For("ada"))
	require.NoError(t, err)
	require.True(t, d.Allowed)
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
		_, err := limits.Take(ctx, b.five.For("ada"), b.one.For("ada"))
		require.ErrorIs(t, err, ratelimit.ErrInvalidConfig, name)
		_, err = limits.Reserve(ctx, b.five.For("ada"))
		require.ErrorIs(t, err, ratelimit.ErrInvalidConfig, name)
	}
	_, err := sqllimit.New(nil, ratelimit.Config{})
	require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
	_, err = sqllimit.New(b.db, ratelimit.Config{SharedQueues: true})
	require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
	require.ErrorIs(t, sqllimit.InTx(ctx, b.limiter, nil), ratelimit.ErrInvalidRequest)
	require.InDelta(t, 5, b.tokens(t, b.five.For("ada")), 0)
}

// rewriting is a transaction of a library that puts the parameters into the text.
type rewriting struct{ *sql.Tx }

// ExecContext leaves the parameters out.
func (r rewriting) ExecContext(ctx context.Context, query string, _ ...any) (sql.Result, error) {
	return r.Tx.ExecContext(ctx, query)
}

func connectionWithATransaction(t *testing.T, b *bundle) {
	ctx := t.Context()
	own, err := b.db.Conn(ctx)
	require.NoError(t, err)
	defer func() { require.NoError(t, own.Close()) }()
	limits := sqllimit.WithTx(b.limiter, own)
	for _, end := range []string{"ROLLBACK", "COMMIT"} {
		_, err = own.ExecContext(ctx, "BEGIN")
		require.NoError(t, err)
		d, err := limits.Take(ctx, b.five.For("ada"), b.one.For("ada"))
		require.NoError(t, err)
		require.True(t, d.Allowed)
		_, err = own.ExecContext(ctx, end)
		require.NoError(t, err)
	}
	require.InDelta(t, 4, b.tokens(t, b.five.For("ada")), 1e-3)
}

// nothingIsRunTwice loses a connection while the answer to a Take is awaited: the server has ended it after the row was changed.
func nothingIsRunTwice(t *testing.T, b *bundle) {
	ctx := t.Context()
	_, err := b.limiter.Take(ctx, b.fifty.For("ada"))
	require.NoError(t, err)
	_, err = b.pool.Exec(ctx, `CREATE TABLE public.runs (n int);
		CREATE SEQUENCE public.attempts;
		CREATE FUNCTION public.ends() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			PERFORM nextval('public.attempts'), pg_terminate_backend(pg_backend_pid());
			RETURN NEW;
		END $$;
		CREATE TRIGGER ends BEFORE UPDATE ON ratelimit.buckets FOR EACH ROW EXECUTE FUNCTION public.ends()`)
	require.NoError(t, err)
	_, err = b.limiter.Take(ctx, b.fifty.For("ada"))
	require.Error(t, err)
	require.NotErrorIs(t, err, ratelimit.ErrLimited)
	var attempts int
	require.NoError(t, b.pool.QueryRow(ctx, `SELECT last_value FROM public.attempts`).Scan(&attempts))
	require.Equal(t, 1, attempts)
}
