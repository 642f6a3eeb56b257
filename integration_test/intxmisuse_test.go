package integration_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func TestInTxRefusesWhatItCannotRun(t *testing.T) {
	t.Parallel()
	s, ctx := newStand(t), t.Context()
	never := func(pgx.Tx) error {
		t.Error("the function was run")
		return nil
	}
	require.ErrorIs(t, s.limiter.InTx(ctx, nil), ratelimit.ErrInvalidRequest)

	var none *ratelimit.Limiter
	require.ErrorIs(t, none.InTx(ctx, never), ratelimit.ErrInvalidConfig)
	require.ErrorIs(t, new(ratelimit.Limiter).InTx(ctx, never), ratelimit.ErrInvalidConfig)

	tx, err := s.pool.Begin(ctx)
	require.NoError(t, err)
	require.ErrorIs(t, s.limiter.WithTx(tx).InTx(ctx, never), ratelimit.ErrInvalidConfig)
	require.NoError(t, s.send(ctx, tx, "ada"), "the transaction is untouched")
	require.NoError(t, tx.Commit(ctx))
	s.requireSent(t, 1)

	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	require.ErrorIs(t, s.limiter.InTx(cancelled, never), context.Canceled)
	s.requireHealthy(t)
}

func TestInTxReportsAStatementErrorThatTheFunctionSwallowed(t *testing.T) {
	t.Parallel()
	s, ctx := newStand(t), t.Context()
	for name, swallow := range map[string]func(pgx.Tx){
		"a statement of the application": func(tx pgx.Tx) { _, _ = tx.Exec(ctx, `SELECT 1 / 0`) },
		"a conflict of the limiter": func(tx pgx.Tx) {
			_ = s.takeOutside(ctx, "grace")
			_ = s.send(ctx, tx, "grace")
		},
	} {
		s.outside.exec(t, `DELETE FROM ratelimit.buckets`)
		require.NoError(t, s.takeOutside(ctx, "grace"))
		before, runs := s.outside.row(t, calls.Name(), "grace"), 0
		err := s.limiter.InTx(ctx, func(tx pgx.Tx) error {
			runs++
			if err := s.send(ctx, tx, "ada"); err != nil {
				return err
			}
			swallow(tx)
			return nil
		})
		require.ErrorIs(t, err, pgx.ErrTxCommitRollback, name)
		require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown, name)
		require.Equal(t, 1, runs, name)
		require.Equal(t, before.Key, s.outside.rows(t, "")[0].Key, "%s: ada took nothing", name)
		require.Zero(t, s.messages(t), name)
	}
	s.requireHealthy(t)
}

func TestInTxReportsATransactionThatTheFunctionEnded(t *testing.T) {
	t.Parallel()
	s, ctx := newStand(t, oneConnection), t.Context()
	for _, step := range []struct {
		end  func(pgx.Tx, context.Context) error
		sent int
	}{
		{end: pgx.Tx.Rollback, sent: 0},
		{end: pgx.Tx.Commit, sent: 1},
	} {
		runs := 0
		err := s.limiter.InTx(ctx, func(tx pgx.Tx) error {
			runs++
			if err := s.send(ctx, tx, "ada"); err != nil {
				return err
			}
			return step.end(tx, ctx)
		})
		require.ErrorIs(t, err, pgx.ErrTxClosed)
		require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown)
		require.ErrorContains(t, err, "fn ended the transaction itself")
		require.Equal(t, 1, runs)
		s.requireSent(t, step.sent)
	}
	s.requireHealthy(t)
}

// SQL that ends the transaction is noticed as well, also behind a savepoint that is left open and with SharedQueues, and no
// decision is reported as committed.
func TestInTxReportsATransactionThatSQLEnded(t *testing.T) {
	t.Parallel()
	for name, step := range map[string]struct {
		sql    string
		shared bool
		nested bool
		sent   int
	}{
		"RolledBack":       {sql: `ROLLBACK`},
		"Committed":        {sql: `COMMIT`, sent: 1},
		"Nested":           {sql: `ROLLBACK`, nested: true},
		"WithSharedQueues": {sql: `ROLLBACK`, shared: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, ctx := newStand(t, oneConnection), t.Context()
			heard := &heardCosts{}
			s.limiter = s.with(t, ratelimit.Config{Observer: heard, SharedQueues: step.shared})
			err := s.limiter.InTx(ctx, func(tx pgx.Tx) error {
				if err := s.send(ctx, tx, "ada"); err != nil {
					return err
				}
				if step.nested {
					nested, err := tx.Begin(ctx)
					if err != nil {
						return err
					}
					tx = nested
				}
				_, err := tx.Exec(ctx, step.sql)
				return err
			})
			require.ErrorIs(t, err, pgx.ErrTxClosed)
			require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown)
			require.ErrorContains(t, err, "fn ended the transaction itself; its writes may be committed")
			require.Empty(t, heard.costs)
			s.requireSent(t, step.sent)
			s.requireHealthy(t)
		})
	}
}

// After a ROLLBACK in SQL a call commits by itself. The error of InTx says that this may have happened.
func TestInTxReportsThatCallsAfterARollbackMayBeCommitted(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "a decision on locked rows sets a savepoint, which fails outside of a transaction")
	s, ctx := newStand(t, oneConnection), t.Context()
	err := s.limiter.InTx(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `ROLLBACK`); err != nil {
			return err
		}
		return s.limiter.WithTx(tx).Require(ctx, calls.For("ada"))
	})
	require.ErrorIs(t, err, pgx.ErrTxClosed)
	require.ErrorContains(t, err, "fn ended the transaction itself; its writes may be committed")
	require.Len(t, s.outside.rows(t, ""), 1, "the token is spent")
}

// A function that ends its transaction gives the connection back, and the pool may lend it to another caller at once, or close it.
// After that InTx must not touch it.
func TestInTxLeavesTheConnectionAloneThatTheFunctionGaveBack(t *testing.T) {
	t.Parallel()
	for name, lend := range map[string]func(*pgx.Conn) error{
		"in use": func(conn *pgx.Conn) error {
			for range 20 {
				if err := conn.Ping(t.Context()); err != nil {
					return err
				}
			}
			return nil
		},
		"closed": func(conn *pgx.Conn) error { return conn.Close(t.Context()) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, ctx := newStand(t, oneConnection), t.Context()
			runs := 0
			lent := make(chan error, 100) // one a run
			err := s.limiter.InTx(ctx, func(tx pgx.Tx) error {
				runs++
				if err := s.send(ctx, tx, "ada"); err != nil {
					return err
				}
				if err := tx.Commit(ctx); err != nil {
					return err
				}
				conn, err := s.pool.Acquire(ctx)
				if err != nil {
					return err
				}
				started := make(chan struct{})
				go func() {
					defer conn.Release()
					close(started)
					lent <- lend(conn.Conn())
				}()
				<-started
				return nil
			})
			require.NoError(t, <-lent)
			require.ErrorIs(t, err, pgx.ErrTxClosed)
			require.Equal(t, 1, runs, "what was committed is not run again")
			s.requireSent(t, 1)
			s.requireHealthy(t)
		})
	}
}

// The outcome of a commit inside the function may be unknown: to run the function again could take twice.
func TestInTxDoesNotRetryACommitOfUnknownOutcomeInsideTheFunction(t *testing.T) {
	t.Parallel()
	s, ctx := newStand(t), t.Context()
	runs := 0
	unknown := &pgconn.PgError{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "57P01", Message: "terminating connection"}
	err := s.limiter.InTx(ctx, func(tx pgx.Tx) error {
		runs++
		if err := s.send(ctx, tx, "ada"); err != nil {
			return err
		}
		return fmt.Errorf("%w: %w", ratelimit.ErrCommitUnknown, unknown)
	})
	require.ErrorIs(t, err, ratelimit.ErrCommitUnknown)
	require.Equal(t, 1, runs)
	s.requireSent(t, 0)
	s.requireHealthy(t)
}
