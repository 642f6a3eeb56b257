package integration_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// xid returns the transaction's id, and with it fixes the snapshot of a SERIALIZABLE one.
func xid(ctx context.Context, tx pgx.Tx) (id int64, err error) {
	err = tx.QueryRow(ctx, `SELECT pg_current_xact_id()::text::bigint`).Scan(&id)
	return id, err
}

func TestInTxRetriesAConflictAtAStatement(t *testing.T) {
	t.Parallel()
	s, ctx := newStand(t), t.Context()
	require.NoError(t, s.takeOutside(ctx, "ada"))
	var codes []string
	var ids []int64
	err := s.limiter.InTx(ctx, func(tx pgx.Tx) error {
		id, err := xid(ctx, tx)
		if err != nil {
			return err
		}
		ids = append(ids, id)
		if _, err := tx.Exec(ctx, `INSERT INTO public.messages (key) VALUES ('before')`); err != nil {
			return err
		}
		if len(ids) == 1 {
			if err := s.takeOutside(ctx, "ada"); err != nil {
				return err
			}
		}
		err = s.send(ctx, tx, "ada")
		codes = append(codes, sqlstate(err))
		return err
	})
	require.NoError(t, err)
	require.Equal(t, []string{"40001", ""}, codes, "the first run lost at the limit's statement")
	require.NotEqual(t, ids[0], ids[1], "the second run had a transaction of its own")
	require.Equal(t, 3, s.taken(t), "two outside, one inside")
	require.Equal(t, 2, s.messages(t), "what the first run wrote is undone")
	s.requireHealthy(t)
}

// skew makes tx, which will commit next, the loser of a write skew. The transaction of a second doctor reads the old version of the
// row that tx wrote, writes the row that tx has read, and commits first.
func (s *stand) skew(ctx context.Context, tx pgx.Tx) (err error) {
	const onCall = `SELECT FROM public.doctors WHERE on_call`
	if _, err := tx.Exec(ctx, onCall); err != nil {
		return err
	}
	partner, err := s.outside.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.Serializable})
	if err != nil {
		return err
	}
	defer func() { _ = partner.Rollback(context.WithoutCancel(ctx)) }()
	if _, err := partner.Exec(ctx, onCall); err != nil {
		return fmt.Errorf("partner: %w", err)
	}
	if _, err := tx.Exec(ctx, `UPDATE public.doctors SET on_call = NOT on_call WHERE name = 'ada'`); err != nil {
		return err
	}
	if _, err := partner.Exec(ctx, `UPDATE public.doctors SET on_call = NOT on_call WHERE name = 'grace'`); err != nil {
		return fmt.Errorf("partner: %w", err)
	}
	if err := partner.Commit(ctx); err != nil {
		return fmt.Errorf("partner: %w", err)
	}
	return nil
}

func newSkewedStand(t *testing.T) *stand {
	t.Helper()
	s := newStand(t)
	s.outside.exec(t, `CREATE TABLE public.doctors (name text PRIMARY KEY, on_call boolean NOT NULL)`)
	s.outside.exec(t, `INSERT INTO public.doctors VALUES ('ada', true), ('grace', true)`)
	return s
}

func TestInTxRetriesAConflictAtCommit(t *testing.T) {
	t.Parallel()
	s, ctx := newSkewedStand(t), t.Context()
	succeeded := 0
	err := s.limiter.InTx(ctx, func(tx pgx.Tx) error {
		if err := s.send(ctx, tx, "ada"); err != nil {
			return err
		}
		if succeeded == 0 {
			if err := s.skew(ctx, tx); err != nil {
				return err
			}
		}
		succeeded++
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, 2, succeeded, "every statement of the first run succeeded, so that it was its COMMIT that failed")
	s.requireSent(t, 1)
	s.requireHealthy(t)
}

func TestInTxNeverReportsAFailedCommitAsSuccess(t *testing.T) {
	t.Parallel()
	s, ctx := newSkewedStand(t), t.Context()
	s.limiter = s.with(t, ratelimit.Config{MaxAttempts: 3})
	succeeded := 0
	err := s.limiter.InTx(ctx, func(tx pgx.Tx) error {
		if err := s.send(ctx, tx, "ada"); err != nil {
			return err
		}
		if err := s.skew(ctx, tx); err != nil {
			return err
		}
		succeeded++
		return nil
	})
	require.ErrorIs(t, err, ratelimit.ErrContended)
	require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown)
	require.Equal(t, "40001", sqlstate(err))
	require.True(t, ratelimit.IsRetryable(err))
	require.Equal(t, 3, succeeded, "MaxAttempts runs, each of which failed at its COMMIT")
	s.requireSent(t, 0)
	s.requireHealthy(t)
}

func TestInTxBoundsTheAttempts(t *testing.T) {
	t.Parallel()
	s, ctx := newStand(t), t.Context()
	s.limiter = s.with(t, ratelimit.Config{MaxAttempts: 4})
	require.NoError(t, s.takeOutside(ctx, "ada"))
	runs := 0
	err := s.limiter.InTx(ctx, s.alwaysBeaten(ctx, &runs))
	require.ErrorIs(t, err, ratelimit.ErrContended)
	require.Equal(t, "40001", sqlstate(err), "the last cause is wrapped")
	require.Equal(t, 4, runs)
	require.Equal(t, 5, s.taken(t), "what was taken outside, and nothing else")
	require.Zero(t, s.messages(t))
	s.requireHealthy(t)
}

// alwaysBeaten returns a function for InTx that loses its bucket to another transaction in every run.
func (s *stand) alwaysBeaten(ctx context.Context, runs *int) func(pgx.Tx) error {
	return func(tx pgx.Tx) error {
		*runs++
		if _, err := xid(ctx, tx); err != nil {
			return err
		}
		if err := s.takeOutside(context.WithoutCancel(ctx), "ada"); err != nil {
			return err
		}
		return s.send(ctx, tx, "ada")
	}
}

// expiring is a context whose deadline is over when the test says so.
type expiring struct {
	context.Context //nolint:containedctx // it is one
	expired         chan struct{}
}

func (c *expiring) Deadline() (time.Time, bool) { return time.Now().Add(patient), true }
func (c *expiring) Done() <-chan struct{}       { return c.expired }

func (c *expiring) Err() error {
	select {
	case <-c.expired:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

func TestInTxStopsRetryingAtTheDeadline(t *testing.T) {
	t.Parallel()
	s := newStand(t)
	s.limiter = s.with(t, ratelimit.Config{MaxAttempts: 50})
	ctx := &expiring{Context: t.Context(), expired: make(chan struct{})}
	runs := 0
	lose := s.alwaysBeaten(ctx, &runs)
	err := s.limiter.InTx(ctx, func(tx pgx.Tx) error {
		err := lose(tx)
		if runs == 3 {
			close(ctx.expired)
		}
		return err
	})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NotErrorIs(t, err, ratelimit.ErrContended)
	require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown)
	require.Equal(t, "40001", sqlstate(err), "the conflict that it was retrying for is wrapped too")
	require.Equal(t, 3, runs)
	require.Equal(t, 3, s.taken(t), "what was taken outside, and nothing else")
	require.Zero(t, s.messages(t))
	s.requireHealthy(t)
}

func TestInTxStopsRetryingWhenTheCallerGivesUp(t *testing.T) {
	t.Parallel()
	s := newStand(t)
	require.NoError(t, s.takeOutside(t.Context(), "ada"))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	runs := 0
	lose := s.alwaysBeaten(ctx, &runs)
	err := s.limiter.InTx(ctx, func(tx pgx.Tx) error {
		err := lose(tx)
		if runs == 3 {
			cancel()
		}
		return err
	})
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, "40001", sqlstate(err), "the conflict that it was retrying for is wrapped too")
	require.Equal(t, 3, runs)
	require.Zero(t, s.messages(t))
	s.requireHealthy(t)
}

// Two callers take two limits in separate calls, in opposite order, which the limiter cannot sort.
func TestInTxRetriesADeadlock(t *testing.T) {
	t.Parallel()
	s, ctx := newStand(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["deadlock_timeout"] = "100ms" }), t.Context()
	orders := [2][2]string{{"ada", "grace"}, {"grace", "ada"}}
	var holding sync.WaitGroup // until each has its first row, in its first run
	holding.Add(len(orders))
	var codes [2][]string
	err := atonce.Do(len(orders), func(worker int) error {
		return s.limiter.InTx(ctx, func(tx pgx.Tx) error {
			if err := s.send(ctx, tx, orders[worker][0]); err != nil {
				codes[worker] = append(codes[worker], sqlstate(err))
				return err
			}
			if len(codes[worker]) == 0 {
				holding.Done()
				holding.Wait()
			}
			err := s.send(ctx, tx, orders[worker][1])
			codes[worker] = append(codes[worker], sqlstate(err))
			return err
		})
	})
	require.NoError(t, err)
	require.Contains(t, append(codes[0], codes[1]...), "40P01", "they did deadlock")
	s.requireSent(t, 4)
	s.requireHealthy(t)
}

func TestInTxReturnsTheErrorOfTheFunctionAsItIs(t *testing.T) {
	t.Parallel()
	s, ctx := newStand(t), t.Context()
	errFull := errors.New("the disk of somebody else is full")
	runs := 0
	err := s.limiter.InTx(ctx, func(tx pgx.Tx) error {
		runs++
		if err := s.send(ctx, tx, "ada"); err != nil {
			return err
		}
		return errFull
	})
	require.Equal(t, errFull, err, "not wrapped")
	require.Equal(t, 1, runs)
	s.requireSent(t, 0)
	s.requireHealthy(t)
}

func TestInTxReturnsARefusalAndUndoesTheRest(t *testing.T) {
	t.Parallel()
	s, ctx := newStand(t), t.Context()
	once := ratelimit.Define("once", hoard(1))
	err := s.limiter.InTx(ctx, func(tx pgx.Tx) error {
		if err := s.send(ctx, tx, "ada"); err != nil {
			return err
		}
		for range 2 {
			d, err := s.limiter.WithTx(tx).Take(ctx, once.Global())
			if err != nil {
				return err
			}
			if !d.Allowed {
				return fmt.Errorf("sign up: %w", d.Err())
			}
		}
		return nil
	})
	require.ErrorIs(t, err, ratelimit.ErrLimited)
	require.ErrorContains(t, err, "sign up: ")
	var limited *ratelimit.LimitedError
	require.ErrorAs(t, err, &limited)
	require.Positive(t, limited.Decision.RetryAfter)
	require.Equal(t, once.Name(), limited.Decision.States[0].Limit.Name())
	require.Empty(t, s.outside.rows(t, ""), "neither limit has a row")
	s.requireSent(t, 0)
	s.requireHealthy(t)
}

func TestInTxRollsBackWhenTheFunctionPanics(t *testing.T) {
	t.Parallel()
	s, ctx := newStand(t, oneConnection), t.Context()
	runs := 0
	require.PanicsWithValue(t, "out of cheese", func() {
		_ = s.limiter.InTx(ctx, func(tx pgx.Tx) error {
			runs++
			if err := s.send(ctx, tx, "ada"); err != nil {
				return err
			}
			panic("out of cheese")
		})
	})
	require.Equal(t, 1, runs)
	s.requireSent(t, 0)
	s.requireHealthy(t)
}

func oneConnection(config *pgxpool.Config) { config.MaxConns = 1 }
