package integration_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimit/event"
)

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
	return errors.Join(r.takeOutside(ctx), r.execute(`SELECT pg_current_xact_id()`), r.takeOutside(ctx), r.sends("ada"))
}

// atFirst is the function of a run that fails at first, and sends in its second run.
func atFirst(fails func(r run) error) func(r run) error {
	return func(r run) error {
		if r.n > 1 {
			return r.sends("ada")
		}
		return fails(r)
	}
}

// then returns the function of a run that sends for another key, and then does the same as next.
func then(next func(r run) error) func(r run) error {
	return func(r run) error { return errors.Join(r.sends("grace"), next(r)) }
}

var errFull = errors.New("the disk of somebody else is full")

// InTx commits what its function did, or nothing of it. It runs the function again after a conflict and after a lost
// connection, and otherwise says what happened.
func TestInTxRetriesOrReturnsTheReason(t *testing.T) {
	t.Parallel()
	const ended = "fn ended the transaction itself"
	once, shared := ratelimit.Define("once", hoard(1)), newStand(t)
	rollback, endBackend := func(r run) error { return r.execute(`ROLLBACK`) }, func(r run) error { return r.terminate(r.ctx, r.Conn().PgConn().PID()) }
	for name, test := range map[string]struct {
		fn              func(r run) error
		want            error
		says            string
		runs            int
		taken, messages int
		config          ratelimit.Config
	}{
		"Done":          {fn: func(r run) error { return r.sends("ada") }, runs: 1, taken: 1, messages: 1},
		"AnErrorAsItIs": {fn: then(func(run) error { return errFull }), want: errFull, runs: 1},
		"ARefusal": {fn: then(func(r run) error {
			require := func() error { return r.limiter.WithTx(r.Tx).Require(r.ctx, once.Global()) }
			return fmt.Errorf("sign up: %w", errors.Join(require(), require()))
		}), want: ratelimit.ErrLimited, says: "sign up: ", runs: 1},
		"AStatementErrorThatIsSwallowed": {
			fn: then(func(r run) error { _ = r.execute(`SELECT 1 / 0`); return nil }), want: pgx.ErrTxCommitRollback, runs: 1,
		},
		"AConflictThatIsSwallowed": {
			fn: then(func(r run) error { _ = r.isBeaten(); return nil }), want: pgx.ErrTxCommitRollback, runs: 1, taken: 2,
		},
		"EndedByRollback":  {fn: then(func(r run) error { return r.Rollback(r.ctx) }), want: pgx.ErrTxClosed, says: ended, runs: 1},
		"EndedByCommit":    {fn: then(func(r run) error { return r.Commit(r.ctx) }), want: pgx.ErrTxClosed, says: ended, runs: 1, taken: 1, messages: 1},
		"EndedByASQLAbort": {fn: then(rollback), want: pgx.ErrTxClosed, says: ended, runs: 1},
		"EndedByASQLCommit": {
			fn: then(func(r run) error { return r.execute(`COMMIT`) }), want: pgx.ErrTxClosed,
			says: ended + "; its writes may be committed", runs: 1, taken: 1, messages: 1,
		},
		"EndedInASavepoint": {fn: func(r run) (err error) {
			if r.Tx, err = r.Begin(r.ctx); err != nil {
				return err
			}
			return then(rollback)(r)
		}, want: pgx.ErrTxClosed, says: ended, runs: 1},
		"AConflictInASavepoint": {fn: then(func(r run) error { // which is the function's
			outer := r.Tx
			lost := pgx.BeginFunc(r.ctx, outer, func(savepoint pgx.Tx) error {
				r.Tx = savepoint
				return r.isBeaten()
			})
			if r.Tx = outer; sqlstate(lost) != "40001" {
				return errors.Join(errFull, lost)
			}
			return r.sends("after")
		}), runs: 1, taken: 4, messages: 2},
		"UnknownInsideTheFunction": {fn: then(func(run) error {
			unknown := &pgconn.PgError{SeverityUnlocalized: "FATAL", Code: "57P01", Message: "terminating connection"}
			return fmt.Errorf("%w: %w", ratelimit.ErrCommitUnknown, unknown)
		}), want: ratelimit.ErrCommitUnknown, runs: 1},
		// the client cannot know that COMMIT came too late
		"BackendTerminatedBeforeCommit":  {fn: then(endBackend), want: ratelimit.ErrCommitUnknown, runs: 1},
		"BackendTerminatedInTheFunction": {fn: atFirst(then(func(r run) error { return errors.Join(endBackend(r), r.sends("ada")) })), runs: 2, taken: 1, messages: 1},
		"IdleTooLong": {fn: atFirst(then(func(r run) error {
			err := r.execute(`SET LOCAL idle_in_transaction_session_timeout = '10ms'`)
			r.awaitEnd(r.t, r.Conn().PgConn().PID())
			return errors.Join(err, r.sends("ada"))
		})), runs: 2, taken: 1, messages: 1},
		"IdleTooLongBeforeCommit": {fn: atFirst(then(func(r run) error {
			err := r.execute(`SET LOCAL idle_in_transaction_session_timeout = '10ms'`)
			r.awaitEnd(r.t, r.Conn().PgConn().PID())
			return err
		})), runs: 2, taken: 1, messages: 1},
		"AConflict": {fn: atFirst(func(r run) error {
			return errors.Join(r.execute(`INSERT INTO public.messages (key) VALUES ('undone')`), r.isBeaten())
		}), runs: 2, taken: 3, messages: 1},
		"AConflictEachTime":    {fn: run.isBeaten, want: ratelimit.ErrContended, says: "40001", runs: 4, taken: 8, config: ratelimit.Config{MaxAttempts: 4}},
		"GivenUpInTheFunction": {fn: then(func(r run) error { r.giveUp(); return nil }), want: context.Canceled, runs: 1},
		"GivenUpBetweenAttempts": {fn: func(r run) error {
			err := r.isBeaten()
			if r.n == 3 {
				r.giveUp()
			}
			return err
		}, want: context.Canceled, says: "40001", runs: 3, taken: 6},
	} {
		t.Run(name, func(t *testing.T) {
			s, told, runs := shared.emptied(t), 0, 0
			test.config.Observer = observing(func(e event.Event) {
				if _, is := e.(ratelimit.Decided); is {
					told++
				}
			})
			s.limiter = s.with(t, test.config)
			ctx, giveUp := context.WithCancel(t.Context())
			defer giveUp()
			err := s.limiter.InTx(ctx, func(tx pgx.Tx) error {
				runs++
				return test.fn(run{s, tx, t, ctx, giveUp, runs})
			})
			require.ErrorIs(t, err, test.want)
			if test.want != nil {
				require.ErrorContains(t, err, test.says)
				for _, only := range []error{ratelimit.ErrCommitUnknown, ratelimit.ErrContended} {
					require.Equal(t, errors.Is(test.want, only), errors.Is(err, only), "%v", err)
				}
				require.True(t, errors.Is(test.want, ratelimit.ErrLimited) || told == 0, "%d decisions are told that were not committed", told)
			}
			if test.says == "40001" {
				requireOnePrefix(t, err, test.want, "InTx")
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
	s, ctx := newStand(t, oneConnection), t.Context()
	err := s.limiter.InTx(ctx, func(tx pgx.Tx) error {
		for _, sql := range []string{`SELECT`, `ROLLBACK`} {
			if _, err := tx.Exec(ctx, sql); err != nil {
				return err
			}
		}
		return s.limiter.WithTx(tx).Require(ctx, calls.For("ada"))
	})
	require.ErrorIs(t, err, pgx.ErrTxClosed)
	require.ErrorContains(t, err, "fn ended the transaction itself; its writes may be committed")
	require.Len(t, s.outside.rows(t, ""), 1, "the token is spent")
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

// A function that ends its transaction gives the connection back, and the pool may lend it to another caller at once.
// After that InTx must not touch it.
func TestInTxDoesNotUseAReleasedConnection(t *testing.T) {
	t.Parallel()
	s, ctx := newStand(t, oneConnection), t.Context()
	lent := make(chan error, 1)
	err := s.limiter.InTx(ctx, func(tx pgx.Tx) error {
		if err := errors.Join(s.send(ctx, tx, "ada"), tx.Commit(ctx)); err != nil {
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
			var err error
			for range 20 {
				err = errors.Join(err, conn.Ping(ctx))
			}
			lent <- err
		}()
		<-started
		return nil
	})
	require.NoError(t, <-lent)
	require.ErrorIs(t, err, pgx.ErrTxClosed)
	s.requireSent(t, 1) // what was committed is not run again
	s.requireHealthy(t)
}

func oneConnection(config *pgxpool.Config) { config.MaxConns = 1 }

// An argument that pgx can't encode is an error of fn: InTx doesn't run fn again, also where pgx closes the connection.
func TestInTxRunsOnceIfAnArgumentIsInvalid(t *testing.T) {
	t.Parallel()
	b := setup(t)
	bad := func(tx pgx.Tx) error {
		batch := &pgx.Batch{}
		batch.Queue(`SELECT $1::integer`, int64(5e9))
		return tx.SendBatch(t.Context(), batch).Close()
	}
	for name, fn := range map[string]func(tx pgx.Tx) error{
		"First": func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), `SELECT $1::integer`, int64(5e9))
			return err
		},
		"FirstBatch": bad,
		"LaterBatch": func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), `SELECT 1`); err != nil {
				return err
			}
			return bad(tx)
		},
	} {
		runs := 0
		err := b.limiter.InTx(t.Context(), func(tx pgx.Tx) error {
			runs++
			return fn(tx)
		})
		require.ErrorContains(t, err, "failed to encode", name)
		require.NotContains(t, err.Error(), "begin", name)
		require.Equal(t, 1, runs, name)
	}
}

// A connection that is lost while a later batch is prepared runs fn again, as one that is lost elsewhere does.
func TestInTxRunsAgainIfTheConnectionIsLostBeforeABatch(t *testing.T) {
	t.Parallel()
	b := setup(t)
	holder := b.begin(t, pgx.ReadCommitted)
	require.NoError(t, errOf(holder.Exec(t.Context(), `LOCK ratelimit.upstreams`))) // or the server could answer in time
	runs := 0
	require.NoError(t, b.limiter.InTx(t.Context(), func(tx pgx.Tx) error {
		runs++
		if _, err := tx.Exec(t.Context(), `SELECT 1`); err != nil {
			return err
		}
		if runs == 1 {
			require.NoError(t, tx.Conn().PgConn().Conn().(interface{ CloseRead() error }).CloseRead())
		} else {
			require.NoError(t, holder.Rollback(t.Context()))
		}
		batch := &pgx.Batch{}
		batch.Queue(`SELECT $1::integer FROM ratelimit.upstreams`, 1)
		return tx.SendBatch(t.Context(), batch).Close()
	}))
	require.Equal(t, 2, runs)
}
