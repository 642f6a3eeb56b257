package driver_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/sqllimit"
)

// send is a function for InTx that takes from two limits and writes.
func (b *bundle) send(ctx context.Context) func(tx *sql.Tx, limits *ratelimit.Limiter) error {
	return func(tx *sql.Tx, limits *ratelimit.Limiter) error {
		d, err := limits.Take(ctx, b.five.For("ada"), b.fifty.For("ada"))
		if err != nil {
			return err
		}
		if !d.Allowed {
			return d.Err()
		}
		_, err = tx.ExecContext(ctx, `INSERT INTO public.messages (author) VALUES ($1)`, "ada")
		return err
	}
}

func inTxCommits(t *testing.T, b *bundle) {
	ctx := t.Context()
	for range 5 {
		require.NoError(t, sqllimit.InTx(ctx, b.limiter, b.send(ctx)))
	}
	require.ErrorIs(t, sqllimit.InTx(ctx, b.limiter, b.send(ctx)), ratelimit.ErrLimited)
	require.InDelta(t, 45, b.tokens(t, b.fifty.For("ada")), 1e-3)
	require.Equal(t, 5, b.messages(t))
	require.Zero(t, b.db.Stats().InUse, "the connections are back")
}

func inTxRollsBack(t *testing.T, b *bundle) {
	ctx := t.Context()
	own := errors.New("of the function")
	err := sqllimit.InTx(ctx, b.limiter, func(tx *sql.Tx, limits *ratelimit.Limiter) error {
		require.NoError(t, b.send(ctx)(tx, limits))
		return own
	})
	require.Equal(t, own, err)
	require.Panics(t, func() {
		_ = sqllimit.InTx(ctx, b.limiter, func(tx *sql.Tx, limits *ratelimit.Limiter) error {
			require.NoError(t, b.send(ctx)(tx, limits))
			panic("of the function")
		})
	})
	ended, cancel := context.WithCancel(ctx)
	err = sqllimit.InTx(ended, b.limiter, func(tx *sql.Tx, limits *ratelimit.Limiter) error {
		defer cancel()
		return b.send(ctx)(tx, limits)
	})
	require.ErrorIs(t, err, context.Canceled)
	require.Zero(t, b.messages(t))
	require.InDelta(t, 50, b.tokens(t, b.fifty.For("ada")), 0)
	require.Zero(t, b.db.Stats().InUse, "the connections are back")
}

// elsewhere takes from a bucket in a transaction of its own that has committed when it returns.
func (b *bundle) elsewhere(ctx context.Context, request ratelimit.Request) error {
	return b.ofPgx.InTx(ctx, func(tx pgx.Tx) error {
		_, err := b.ofPgx.WithTx(tx).Take(ctx, request)
		return err
	})
}

func inTxAgainAtAStatement(t *testing.T, b *bundle) {
	ctx, runs := t.Context(), 0
	err := sqllimit.InTx(ctx, b.limiter, func(tx *sql.Tx, limits *ratelimit.Limiter) error {
		runs++
		var n int
		if err := tx.QueryRowContext(ctx, `SELECT count(*) FROM public.messages`).Scan(&n); err != nil { // has its snapshot now
			return err
		}
		if runs == 1 {
			require.NoError(t, b.elsewhere(ctx, b.fifty.For("ada")))
		}
		return b.send(ctx)(tx, limits)
	})
	require.NoError(t, err)
	require.Equal(t, 2, runs)
	require.InDelta(t, 48, b.tokens(t, b.fifty.For("ada")), 1e-3)
	require.Equal(t, 1, b.messages(t))
}

// inTxAgainAtCommit has two transactions that each read what the other writes. The first to commit wins, and the other gets an
// error at its COMMIT.
func inTxAgainAtCommit(t *testing.T, b *bundle) {
	ctx, runs := t.Context(), 0
	_, err := b.pool.Exec(ctx, `CREATE TABLE public.duty (who text PRIMARY KEY, on_call bool); INSERT INTO public.duty VALUES ('ada', true), ('bob', true)`)
	require.NoError(t, err)
	const count, leave = `SELECT count(*) FROM public.duty WHERE on_call`, `UPDATE public.duty SET on_call = false WHERE who = $1`
	returned := false
	err = sqllimit.InTx(ctx, b.limiter, func(tx *sql.Tx, limits *ratelimit.Limiter) error {
		runs++
		returned = false
		if err := b.send(ctx)(tx, limits); err != nil {
			return err
		}
		var n int
		if err := tx.QueryRowContext(ctx, count).Scan(&n); err != nil {
			return err
		}
		if n == 2 {
			if _, err := tx.ExecContext(ctx, leave, "ada"); err != nil {
				return err
			}
		}
		if runs == 1 {
			other, err := b.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.Serializable})
			require.NoError(t, err)
			require.NoError(t, other.QueryRow(ctx, count).Scan(&n))
			_, err = other.Exec(ctx, leave, "bob")
			require.NoError(t, err)
			require.NoError(t, other.Commit(ctx))
		}
		returned = true
		return nil
	})
	require.NoError(t, err)
	require.True(t, returned, "it was COMMIT that failed")
	require.Equal(t, 2, runs)
	require.InDelta(t, 49, b.tokens(t, b.fifty.For("ada")), 1e-3, "the first attempt took nothing")
	require.Equal(t, 1, b.messages(t))
}

func inTxCommitUnknown(t *testing.T, b *bundle) {
	ctx, runs := t.Context(), 0
	_, err := b.pool.Exec(ctx, `CREATE FUNCTION public.ends() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			PERFORM pg_terminate_backend(pg_backend_pid());
			RETURN NULL;
		END $$;
		CREATE CONSTRAINT TRIGGER ends AFTER INSERT ON public.messages DEFERRABLE INITIALLY DEFERRED
			FOR EACH ROW EXECUTE FUNCTION public.ends()`)
	require.NoError(t, err)
	err = sqllimit.InTx(ctx, b.limiter, func(tx *sql.Tx, limits *ratelimit.Limiter) error {
		runs++
		return b.send(ctx)(tx, limits)
	})
	require.ErrorIs(t, err, ratelimit.ErrCommitUnknown)
	require.Equal(t, 1, runs)
	require.Zero(t, b.db.Stats().InUse, "the connections are back")
}

func inTxAfterALostConnection(t *testing.T, b *bundle) {
	ctx, runs := t.Context(), 0
	err := sqllimit.InTx(ctx, b.limiter, func(tx *sql.Tx, limits *ratelimit.Limiter) error {
		runs++
		if runs == 1 {
			if _, err := tx.ExecContext(ctx, `SELECT pg_terminate_backend(pg_backend_pid())`); err == nil {
				return errors.New("the session goes on")
			}
		}
		return b.send(ctx)(tx, limits)
	})
	require.NoError(t, err)
	require.Equal(t, 2, runs)
	require.Equal(t, 1, b.messages(t))
}

func inTxSwallowedError(t *testing.T, b *bundle) {
	ctx := t.Context()
	err := sqllimit.InTx(ctx, b.limiter, func(tx *sql.Tx, limits *ratelimit.Limiter) error {
		err := b.send(ctx)(tx, limits)
		_, _ = tx.ExecContext(ctx, `SELECT 1/0`)
		return err
	})
	require.ErrorIs(t, err, pgx.ErrTxCommitRollback)
	require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown)
	require.InDelta(t, 50, b.tokens(t, b.fifty.For("ada")), 0)
}

func inTxEndedByTheFunction(t *testing.T, b *bundle) {
	ctx := t.Context()
	for _, end := range []func(tx *sql.Tx) error{(*sql.Tx).Commit, (*sql.Tx).Rollback} {
		err := sqllimit.InTx(ctx, b.limiter, func(tx *sql.Tx, limits *ratelimit.Limiter) error {
			require.NoError(t, b.send(ctx)(tx, limits))
			require.NoError(t, end(tx))
			_, err := limits.Take(ctx, b.five.For("ada"))
			require.ErrorIs(t, err, sql.ErrTxDone, "and not outside of it")
			return nil
		})
		require.ErrorIs(t, err, pgx.ErrTxClosed)
		require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown)
	}
	require.Equal(t, 1, b.messages(t))
	require.Zero(t, b.db.Stats().InUse, "the connections are back")
}

// inTxEndedBySQL ends the transaction with SQL, which only the driver of pgx shows.
func inTxEndedBySQL(t *testing.T, b *bundle) {
	ctx := t.Context()
	for _, end := range []string{`ROLLBACK`, `COMMIT`} {
		err := sqllimit.InTx(ctx, b.limiter, func(tx *sql.Tx, limits *ratelimit.Limiter) error {
			require.NoError(t, b.send(ctx)(tx, limits))
			_, err := tx.ExecContext(ctx, end)
			return err
		})
		if b.driver.IsPgx {
			require.ErrorIs(t, err, pgx.ErrTxClosed)
			require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown)
		}
	}
	require.Equal(t, 1, b.messages(t))
	require.Zero(t, b.db.Stats().InUse, "the connections are back")
}

func inTxWithAnotherLimiter(t *testing.T, b *bundle) {
	ctx := t.Context()
	require.ErrorIs(t, sqllimit.InTx(ctx, b.ofPgx, b.send(ctx)), ratelimit.ErrInvalidConfig)
	tx := b.begin(t, sql.LevelDefault)
	require.ErrorIs(t, sqllimit.InTx(ctx, sqllimit.WithTx(b.limiter, tx), b.send(ctx)), ratelimit.ErrInvalidConfig)
	d, err := sqllimit.WithTx(b.ofPgx, tx).Take(ctx, b.five.For("ada"))
	require.NoError(t, err)
	require.True(t, d.Allowed, "a Limiter on a pool of pgx does as well")
}

// inTxContended has eight workers take one bucket, which queue once they have met.
func inTxContended(t *testing.T, b *bundle) {
	require.Equal(t, capacity, crowd(t, func(ctx context.Context) (allowed bool, err error) {
		err = sqllimit.InTx(ctx, b.limiter, func(tx *sql.Tx, limits *ratelimit.Limiter) error {
			d, err := limits.Take(ctx, b.fifty.For("ada"))
			if err != nil {
				return err
			}
			if allowed = d.Allowed; !allowed {
				return nil
			}
			_, err = tx.ExecContext(ctx, `INSERT INTO public.messages (author) VALUES ('ada')`)
			return err
		})
		return allowed, err
	}))
	require.Equal(t, capacity, b.messages(t))
}
