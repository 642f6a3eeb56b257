package integration_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// takeSnapshot fixes the snapshot of a SERIALIZABLE transaction.
func takeSnapshot(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, `SELECT pg_current_xact_id()`)
	return err
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

// run is one run of the function of InTx.
type run struct {
	*stand
	pgx.Tx

	t      *testing.T
	ctx    context.Context //nolint:containedctx // of the call
	giveUp func()          // ends ctx
	n      int             // from 1
}

// sends takes for a key, and writes a message.
func (r run) sends(key string) error { return r.send(r.ctx, r.Tx, key) }

// exec executes SQL in the transaction.
func (r run) execute(sql string) error {
	_, err := r.Exec(r.ctx, sql)
	return err
}

// isBeaten takes for ada, whose bucket another transaction has changed since the snapshot.
func (r run) isBeaten() error {
	ctx := context.WithoutCancel(r.ctx)
	if err := r.takeOutside(ctx, "ada"); err != nil {
		return err
	}
	if err := takeSnapshot(r.ctx, r.Tx); err != nil {
		return err
	}
	return errors.Join(r.takeOutside(ctx, "ada"), r.sends("ada"))
}

var errFull = errors.New("the disk of somebody else is full")

// InTx commits what its function did, or nothing of it. It runs the function again after a conflict and after a lost connection, and
// otherwise says what happened.
func TestInTxRunsAgainOrSaysWhy(t *testing.T) {
	t.Parallel()
	const ended = "fn ended the transaction itself"
	once := ratelimit.Define("once", hoard(1))
	for name, test := range map[string]struct {
		fn              func(r run) error
		want            error
		says            string
		runs            int
		taken, messages int
		config          ratelimit.Config
	}{
		"Done":          {fn: func(r run) error { return r.sends("ada") }, runs: 1, taken: 1, messages: 1},
		"AnErrorAsItIs": {fn: func(r run) error { return errors.Join(r.sends("ada"), errFull) }, want: errFull, runs: 1},
		"ARefusal": {
			fn: func(r run) error {
				err := r.sends("ada")
				for range 2 {
					err = errors.Join(err, r.limiter.WithTx(r.Tx).Require(r.ctx, once.Global()))
				}
				return fmt.Errorf("sign up: %w", err)
			}, want: ratelimit.ErrLimited, says: "sign up: ", runs: 1,
		},
		"AStatementErrorThatIsSwallowed": {
			fn: func(r run) error {
				err := r.sends("ada")
				_ = r.execute(`SELECT 1 / 0`)
				return err
			}, want: pgx.ErrTxCommitRollback, runs: 1,
		},
		"AConflictThatIsSwallowed": {
			fn: func(r run) error {
				err := r.sends("grace")
				_ = r.isBeaten()
				return err
			}, want: pgx.ErrTxCommitRollback, runs: 1, taken: 2,
		},
		"EndedByRollback":  {fn: func(r run) error { return errors.Join(r.sends("ada"), r.Rollback(r.ctx)) }, want: pgx.ErrTxClosed, says: ended, runs: 1},
		"EndedByCommit":    {fn: func(r run) error { return errors.Join(r.sends("ada"), r.Commit(r.ctx)) }, want: pgx.ErrTxClosed, says: ended, runs: 1, taken: 1, messages: 1},
		"EndedByASQLAbort": {fn: func(r run) error { return errors.Join(r.sends("ada"), r.execute(`ROLLBACK`)) }, want: pgx.ErrTxClosed, says: ended, runs: 1},
		"EndedByASQLCommit": {
			fn: func(r run) error { return errors.Join(r.sends("ada"), r.execute(`COMMIT`)) }, want: pgx.ErrTxClosed,
			says: ended + "; its writes may be committed", runs: 1, taken: 1, messages: 1,
		},
		"EndedInASavepoint": {
			fn: func(r run) error {
				nested, err := r.Begin(r.ctx)
				if err != nil {
					return err
				}
				r.Tx = nested
				return errors.Join(r.sends("ada"), r.execute(`ROLLBACK`))
			}, want: pgx.ErrTxClosed, says: ended, runs: 1,
		},
		"EndedWithSharedQueues": {
			fn: func(r run) error { return errors.Join(r.sends("ada"), r.execute(`ROLLBACK`)) }, want: pgx.ErrTxClosed, says: ended, runs: 1,
			config: ratelimit.Config{SharedQueues: true},
		},
		"AConflictInASavepoint": { // which is the function's
			fn: func(r run) error {
				err := r.sends("kept")
				lost := pgx.BeginFunc(r.ctx, r.Tx, func(savepoint pgx.Tx) error {
					inner := r
					inner.Tx = savepoint
					return inner.isBeaten()
				})
				if sqlstate(lost) != "40001" {
					return errors.Join(errFull, lost)
				}
				return errors.Join(err, r.sends("after"))
			}, runs: 1, taken: 4, messages: 2,
		},
		"UnknownInsideTheFunction": {
			fn: func(r run) error {
				unknown := &pgconn.PgError{SeverityUnlocalized: "FATAL", Code: "57P01", Message: "terminating connection"}
				return errors.Join(r.sends("ada"), fmt.Errorf("%w: %w", ratelimit.ErrCommitUnknown, unknown))
			}, want: ratelimit.ErrCommitUnknown, runs: 1,
		},
		"BackendTerminatedBeforeCommit": { // the client cannot know that COMMIT came too late
			fn: func(r run) error { return errors.Join(r.sends("ada"), r.terminate(r.ctx, r.Conn().PgConn().PID())) }, want: ratelimit.ErrCommitUnknown, runs: 1,
		},
		"BackendTerminatedInTheFunction": {
			fn: func(r run) error {
				if r.n > 1 {
					return r.sends("ada")
				}
				return errors.Join(r.sends("ada"), r.terminate(r.ctx, r.Conn().PgConn().PID()), r.sends("ada"))
			}, runs: 2, taken: 1, messages: 1,
		},
		"IdleTooLong": {
			fn: func(r run) error {
				if r.n > 1 {
					return r.sends("ada")
				}
				err := errors.Join(r.sends("ada"), r.execute(`SET LOCAL idle_in_transaction_session_timeout = '10ms'`))
				r.awaitEnd(r.t, r.Conn().PgConn().PID())
				return errors.Join(err, r.sends("ada"))
			}, runs: 2, taken: 1, messages: 1,
		},
		"AConflict": {
			fn: func(r run) error {
				if r.n > 1 {
					return r.sends("ada")
				}
				return errors.Join(r.execute(`INSERT INTO public.messages (key) VALUES ('undone')`), r.isBeaten())
			}, runs: 2, taken: 3, messages: 1,
		},
		"AConflictEachTime": {fn: run.isBeaten, want: ratelimit.ErrContended, says: "40001", runs: 4, taken: 8, config: ratelimit.Config{MaxAttempts: 4}},
		"GivenUpInTheFunction": {
			fn: func(r run) error {
				defer r.giveUp()
				return r.sends("ada")
			}, want: context.DeadlineExceeded, runs: 1,
		},
		"GivenUpBetweenAttempts": {
			fn: func(r run) error {
				err := r.isBeaten()
				if r.n == 3 {
					r.giveUp()
				}
				return err
			}, want: context.DeadlineExceeded, says: "40001", runs: 3, taken: 6,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, heard, runs := newStand(t), &heardCosts{}, 0
			test.config.Observer = heard
			s.limiter = s.with(t, test.config)
			ctx := &expiring{Context: t.Context(), expired: make(chan struct{})}
			err := s.limiter.InTx(ctx, func(tx pgx.Tx) error {
				runs++
				return test.fn(run{s, tx, t, ctx, func() { close(ctx.expired) }, runs})
			})
			require.ErrorIs(t, err, test.want)
			if test.want != nil {
				require.ErrorContains(t, err, test.says)
				require.Equal(t, test.want == ratelimit.ErrCommitUnknown, errors.Is(err, ratelimit.ErrCommitUnknown), "%v", err)                           //nolint:errorlint // it is that one
				require.Equal(t, test.want == ratelimit.ErrContended, errors.Is(err, ratelimit.ErrContended), "%v", err)                                   //nolint:errorlint // it is that one
				require.True(t, test.want == ratelimit.ErrLimited || len(heard.costs) == 0, "no decision is told that was not committed: %v", heard.costs) //nolint:errorlint // it is that one
			}
			require.Equal(t, test.runs, runs)
			require.Equal(t, test.taken, s.taken(t))
			require.Equal(t, test.messages, s.messages(t))
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

// A conflict at COMMIT is tried again, and never reported as done.
func TestInTxRetriesAConflictAtCommit(t *testing.T) {
	t.Parallel()
	for name, conflicts := range map[string]int{"Once": 1, "EachTime": 3} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, ctx := newStand(t), t.Context()
			s.outside.exec(t, `CREATE TABLE public.doctors (name text PRIMARY KEY, on_call boolean NOT NULL)`)
			s.outside.exec(t, `INSERT INTO public.doctors VALUES ('ada', true), ('grace', true)`)
			s.limiter = s.with(t, ratelimit.Config{MaxAttempts: 3})
			succeeded := 0 // each statement of a run, so that it was its COMMIT that failed
			err := s.limiter.InTx(ctx, func(tx pgx.Tx) error {
				if err := s.send(ctx, tx, "ada"); err != nil {
					return err
				}
				if succeeded < conflicts {
					if err := s.skew(ctx, tx); err != nil {
						return err
					}
				}
				succeeded++
				return nil
			})
			if conflicts == 1 {
				require.NoError(t, err)
				require.Equal(t, 2, succeeded)
				s.requireSent(t, 1)
			} else {
				require.ErrorIs(t, err, ratelimit.ErrContended)
				require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown)
				require.Equal(t, "40001", sqlstate(err))
				require.True(t, ratelimit.IsRetryable(err))
				require.Equal(t, conflicts, succeeded)
				s.requireSent(t, 0)
			}
			s.requireHealthy(t)
		})
	}
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

// alwaysBeaten returns a function for InTx that loses its bucket to another transaction in every run.
func (s *stand) alwaysBeaten(ctx context.Context, runs *int) func(pgx.Tx) error {
	return func(tx pgx.Tx) error {
		*runs++
		if err := takeSnapshot(ctx, tx); err != nil {
			return err
		}
		if err := s.takeOutside(context.WithoutCancel(ctx), "ada"); err != nil {
			return err
		}
		return s.send(ctx, tx, "ada")
	}
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

func oneConnection(config *pgxpool.Config) { config.MaxConns = 1 }
