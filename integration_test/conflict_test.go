package integration_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// deadlocks closes pool, and returns how many deadlocks the server has found in its database.
func deadlocks(t *testing.T, pool *pgxpool.Pool) (found int) {
	t.Helper()
	require.NoError(t, lastSession(t, pool).QueryRow(t.Context(),
		`SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`).Scan(&found))
	return found
}

// The order of locking must not depend on which rows exist already. Another transaction holds the second row, and one
// caller and then the other queue for it, each with the rows it has locked by then.
func TestTakeLocksInOneOrderWhateverRowsExist(t *testing.T) {
	t.Parallel()
	b := setup(t)
	left, right := ratelimit.Define("left", hoard(1e4)), ratelimit.Define("right", hoard(1e4))
	readCommitted, serializable, standalone := callers()[0], callers()[2], callers()[3]
	for _, pair := range [][2]caller{
		{readCommitted, readCommitted},
		{serializable, serializable},
		{standalone, standalone},
		{standalone, readCommitted},
		{standalone, serializable},
		{readCommitted, standalone},
	} {
		for _, leftExists := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/%s/LeftExists=%v", pair[0].name, pair[1].name, leftExists), func(t *testing.T) { // not parallel: waiting counts all
				key := t.Name()
				require.NoError(t, b.limiter.Reset(t.Context(), right.For(key)))
				if leftExists {
					require.NoError(t, b.limiter.Reset(t.Context(), left.For(key)))
				}
				release := b.holdRow(t, right.Name(), key)
				done := make(chan error, 2)
				for i, c := range pair {
					process := b.with(t, ratelimit.Config{})
					go func() { done <- errOf(c.take(t.Context(), b.db(), process, left.For(key), right.For(key))) }()
					eventually(t, "the caller waits for a row", func() bool { return waiting(t, b.pool) == i+1 })
				}
				release()
				require.NoError(t, <-done)
				require.NoError(t, <-done)
				require.InDelta(t, 1e4-2, b.held(t, "left", key), 0.01)
				require.InDelta(t, 1e4-2, b.held(t, "right", key), 0.01)
			})
		}
	}
	require.Zero(t, deadlocks(t, b.pool))
}

// waiting returns how many sessions of the database wait for a lock.
func waiting(t *testing.T, pool *pgxpool.Pool) int {
	t.Helper()
	var n int
	require.NoError(t, pool.QueryRow(t.Context(),
		`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`).Scan(&n))
	return n
}

// A caller who loses a conflict inside a savepoint of its own gets the server's error, and can continue from the
// savepoint. Earlier writes stay, and other buckets work, but the lost bucket fails for this snapshot.
func TestAConflictInASavepointReachesTheCaller(t *testing.T) {
	t.Parallel()
	for _, level := range levels[1:] {
		t.Run(level.name, func(t *testing.T) {
			t.Parallel()
			shared := newStand(t)
			for verb, call := range map[string]verb{
				"Take":          taking(calls.For("lost")),
				"TakeSeveral":   taking(calls.For("lost"), roomy.For("lost")),
				"TakeFromShard": taking(shardedCalls.For("lost").Cost(callsCapacity/8+1), calls.For("lost")),
				"Reserve":       reserving(calls.For("lost")),
			} {
				t.Run(verb, func(t *testing.T) {
					s, ctx := shared.emptied(t), t.Context()
					takeOne(t, s.outside.limiter, shardedCalls.For("lost"), calls.For("lost"))
					tx := s.begin(t, level.level)
					require.NoError(t, s.send(ctx, tx, "kept"))
					takeOne(t, s.outside.limiter, shardedCalls.For("lost").Cost(callsCapacity/2), calls.For("lost")) // after the snapshot
					for range 2 {
						err := pgx.BeginFunc(ctx, tx, func(savepoint pgx.Tx) error {
							require.NoError(t, s.send(ctx, savepoint, "undone"))
							_, err := call(ctx, s.limiter.WithTx(savepoint))
							require.Equal(t, "25P02", sqlstate(errOf(savepoint.Exec(ctx, `SELECT 1`))), "the savepoint is spoilt, as after any error")
							return err
						})
						require.Equal(t, "40001", sqlstate(err))
						require.True(t, ratelimit.IsRetryable(err))
						require.NotErrorIs(t, err, ratelimit.ErrContended, "nothing was tried again")
						require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown)
					}
					require.NoError(t, s.send(ctx, tx, "after"))
					require.NoError(t, tx.Commit(ctx))
					require.Equal(t, []int{2 + 2, 2}, []int{s.taken(t), s.messages(t)}, "with the tokens outside")
					require.Empty(t, s.outside.rows(t, "undone"))
					require.Zero(t, s.outside.count(t, `SELECT count(*) FROM ratelimit.reservations`))
					s.requireHealthy(t)
				})
			}
		})
	}
}

// Every commit takes the row from all transactions that run beside it. A transaction that waits in the queue of the
// process has a connection, so the head of the queue must not wait for one.
func TestInTxGetsAllOfManyWorkersThroughOnOneKey(t *testing.T) {
	t.Parallel()
	const workers = 32
	each := testkit.Sized(4, 20)
	s, ctx := newStand(t, func(config *pgxpool.Config) { config.MaxConns = 4 }), t.Context()
	var attempts atomic.Int64
	require.NoError(t, atonce.Do(workers, func(int) error {
		for range each {
			err := s.limiter.InTx(ctx, func(tx pgx.Tx) error {
				attempts.Add(1)
				return errors.Join(s.send(ctx, tx, "ada"), errOf(tx.Exec(ctx, `SELECT pg_sleep(0.005)`)))
			})
			if err != nil {
				return err
			}
		}
		return nil
	}))
	require.Less(t, attempts.Load(), int64(2*workers*each), "without the queue of the process it takes more")
	s.requireSent(t, workers*each)
	s.requireHealthy(t)
}

// A row inserted for a lock is marked by a last number of 0. If the mark stays in a row, the row's value still counts:
// it is not mistaken for a new, full row.
func TestARowWithTheMarkOfItsInsertKeepsItsTokens(t *testing.T) {
	t.Parallel()
	b := setup(t)
	reserved, err := b.limiter.Reserve(t.Context(), roomy.For("key").Cost(10))
	require.NoError(t, err)
	takeOne(t, b.limiter, roomy.For("key").Cost(20))
	b.exec(t, `UPDATE ratelimit.buckets SET leased = '{0}'`)
	err = pgx.BeginFunc(t.Context(), b.pool, func(tx pgx.Tx) error { return b.limiter.WithTx(tx).Cancel(t.Context(), reserved.ID) })
	require.NoError(t, err)
	require.InDelta(t, roomy.Capacity()-20, b.held(t, "roomy", "key"), 1e-3)
}

// A row that is updated all the time leaves a dead version behind each time. None of them must touch the index, so that
// the next statement can prune the page and the table stays as small as it was.
//
//nolint:paralleltest // a transaction that others keep open, in whatever database, keeps dead versions from being cleaned
func TestHotRowStaysSmall(t *testing.T) {
	const takers, perTaker, megabyte = 4, 4_000, 1 << 20
	testkit.Long(t, "thousands of updates, one after the other")
	b := setup(t)
	hot := ratelimit.Define("hot", hoard(1e6)).For("key")
	require.NoError(t, b.limiter.Reset(t.Context(), hot))
	single := b.with(t, ratelimit.Config{NoBatching: true})
	require.NoError(t, atonce.Do(takers, func(int) error {
		for range perTaker {
			if err := single.Require(t.Context(), hot); err != nil {
				return err
			}
		}
		return nil
	}))
	require.InDelta(t, 1e6-takers*perTaker, b.row(t, "hot", "key").Value, 100, "all of the updates were made")

	var made, inPlace, size int64
	conn := lastSession(t, b.pool)
	eventually(t, "the sessions report what they did", func() bool {
		require.NoError(t, conn.QueryRow(t.Context(), `
			SELECT sum(n_tup_upd)::bigint, sum(n_tup_hot_upd)::bigint, max(pg_total_relation_size(relid)) FROM pg_stat_user_tables WHERE relname LIKE 'buckets%'`).Scan(&made, &inPlace, &size))
		return made >= takers*perTaker
	})
	require.GreaterOrEqual(t, float64(inPlace)/float64(made), 0.95)
	require.Less(t, size, int64(megabyte))
}

func newCutStand(t *testing.T) (*stand, *cutter) {
	t.Helper()
	c := &cutter{}
	s := newStand(t, c.on)
	require.NoError(t, s.outside.limiter.Credit(t.Context(), calls.For("first"))) // stores the fingerprint, with a COMMIT
	return s, c
}

// InTx runs its function again on another connection if one breaks before COMMIT. A COMMIT without an answer is not
// sent again.
func TestInTxOnAConnectionThatBreaks(t *testing.T) {
	t.Parallel()
	const never, soon = 1_000_000, 10
	const insert = "INSERT INTO public.messages"
	for name, test := range map[string]struct {
		request    string
		side       cut
		cuts       int
		swallowed  bool // whether the function returns nil all the same
		runs, sent int
	}{
		"AtBegin":                   {"begin", cutRequest, 1, false, 2, 1},
		"AtTheAnswerToBegin":        {"begin", cutAnswer, 1, false, 2, 1},
		"AtTheLimit":                {"ada", cutRequest, 1, false, 2, 1},
		"AtTheAnswerOfTheLimit":     {"ada", cutAnswer, 1, false, 2, 1},
		"ThreeTimes":                {"ada", cutAnswer, 3, false, 4, 1},
		"Always":                    {"ada", cutAnswer, never, false, soon, 0},
		"AtTheInsert":               {insert, cutRequest, 1, false, 2, 1},
		"ThatTheFunctionSwallows":   {insert, cutAnswer, 1, true, 2, 1},
		"AtCommitBeforeTheRequest":  {"commit", cutRequest, 1, false, 1, 0},
		"AtCommitBeforeTheResponse": {"commit", cutAnswer, 1, false, 1, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, cutter := newCutStand(t)
			ctx, runs := t.Context(), 0
			cutter.arm(test.request, test.side, test.cuts)
			err := s.limiter.InTx(ctx, func(tx pgx.Tx) error {
				runs++
				if err := s.send(ctx, tx, "ada"); !test.swallowed {
					return err
				}
				return nil
			})
			switch {
			case test.request == "commit":
				require.ErrorIs(t, err, ratelimit.ErrCommitUnknown)
				require.NotErrorIs(t, err, ratelimit.ErrContended)
				require.False(t, ratelimit.IsRetryable(err))
				require.Equal(t, 1, cutter.seen(), "COMMIT was sent once, whatever the driver's SafeToRetry says")
			case test.cuts == never:
				require.Error(t, err)
				require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown, "nothing was written")
				require.Greater(t, runs, 1)
				require.Less(t, runs, soon)
			default:
				require.NoError(t, err)
			}
			if test.cuts != never {
				require.Equal(t, test.runs, runs)
			}
			cutter.arm("", 0, 0)
			s.requireSent(t, test.sent)
			s.requireHealthy(t)
		})
	}
}

// If the server refuses a COMMIT, nothing was written: a conflict is tried again, and another error is returned. That
// is on the same connection, which was rolled back. An error of a server behind the server leaves the outcome unknown.
func TestAnErrorInTheMessageOfCommit(t *testing.T) {
	t.Parallel()
	reserve := func(ctx context.Context, s *stand) error {
		return errOf(s.limiter.Reserve(ctx, calls.For("ada"), other.For("ada")))
	}
	send := func(ctx context.Context, s *stand) error {
		return s.limiter.InTx(ctx, func(tx pgx.Tx) error { return s.send(ctx, tx, "ada") })
	}
	for _, test := range []struct {
		name, table string
		call        func(ctx context.Context, s *stand) error
		atCommit    bool // otherwise at the insert, which Reserve sends in the message of COMMIT
	}{
		{"Reserve/AtTheInsert", "ratelimit.reservations", reserve, false},
		{"Reserve/AtTheCommit", "ratelimit.reservations", reserve, true},
		{"InTx/AtTheCommit", "public.messages", send, true},
	} {
		for code, want := range map[string]error{"40001": nil, "40P01": nil, "55P03": nil, "23505": nil, "XX000": ratelimit.ErrCommitUnknown, "Always40001": ratelimit.ErrContended} {
			t.Run(test.name+"/"+code, func(t *testing.T) {
				t.Parallel()
				representative(t, code, "40001", "23505", "Always40001")
				s := newStand(t, oneConnection)
				s.limiter = s.with(t, ratelimit.Config{MaxAttempts: 3})
				takeOne(t, s.limiter, roomy.For("first"))
				failures, timing := 1, ""
				if code == "Always40001" {
					failures, code = 1000, "40001"
				}
				if test.atCommit {
					timing = "DEFERRABLE INITIALLY DEFERRED"
				}
				s.outside.exec(t, `CREATE SEQUENCE public.attempts`)
				s.outside.exec(t, fmt.Sprintf(`CREATE FUNCTION public.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
					IF nextval('public.attempts') <= %d THEN RAISE EXCEPTION 'on purpose' USING ERRCODE = '%s'; END IF; RETURN NULL; END $$`, failures, code))
				s.outside.exec(t, `CREATE CONSTRAINT TRIGGER fail AFTER INSERT ON `+test.table+` `+timing+` FOR EACH ROW EXECUTE FUNCTION public.fail()`)
				err := test.call(t.Context(), s)
				if want != ratelimit.ErrCommitUnknown { //nolint:errorlint // it is that one
					require.NotErrorIs(t, err, ratelimit.ErrCommitUnknown)
				}
				taken := 0
				switch {
				case want != nil:
					require.ErrorIs(t, err, want)
				case code == "23505", code == "55P03" && test.name == "InTx/AtTheCommit": // COMMIT itself waits for no row
					require.Equal(t, code, sqlstate(err))
				default:
					require.NoError(t, err)
					taken = 1
				}
				require.Equal(t, taken, s.taken(t))
				require.Equal(t, taken, len(s.outside.reserved(t))+s.messages(t))
				require.EqualValues(t, 1, s.pool.Stat().NewConnsCount(), "the connection was rolled back, not thrown away")
				s.requireIdle(t)
			})
		}
	}
}

// A COMMIT that waits is not reported as success if its backend is ended, nor cut short if its caller gives up. A
// COMMIT without an answer is given up after a while, and the server receives a cancel request.
func TestInTxWhileItsCommitWaits(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		meanwhile func(t *testing.T, s *stand, waiter uint32, open, giveUp func())
		want      error
		sent      int
	}{
		"ItsBackendIsEnded": {func(t *testing.T, s *stand, waiter uint32, _, _ func()) {
			t.Helper()
			require.NoError(t, s.terminate(t.Context(), waiter))
		}, ratelimit.ErrCommitUnknown, 0},
		"ItsCallerGivesUp": {func(_ *testing.T, _ *stand, _ uint32, open, giveUp func()) { giveUp(); open() }, nil, 1},
		"ItHasNoAnswer": {func(t *testing.T, _ *stand, _ uint32, open, _ func()) {
			t.Helper()
			tooLong := time.AfterFunc(patient, open)
			t.Cleanup(func() { tooLong.Stop() })
		}, ratelimit.ErrCommitUnknown, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			representative(t, name, "ItsBackendIsEnded", "ItsCallerGivesUp")
			s := newStand(t)
			s.outside.exec(t, `CREATE FUNCTION public.pass_gate() RETURNS trigger LANGUAGE plpgsql AS
				$$ BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NULL; END $$`)
			s.outside.exec(t, `CREATE CONSTRAINT TRIGGER gate AFTER INSERT ON public.messages
				DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.pass_gate()`)
			gate := s.outside.begin(t, pgx.ReadCommitted) // at which every COMMIT that wrote a message waits
			require.NoError(t, errOf(gate.Exec(t.Context(), `SELECT pg_advisory_xact_lock(1)`)))
			open := func() { _ = gate.Rollback(context.WithoutCancel(t.Context())) }
			runs := 0
			inTx := askFor(t, func(ctx context.Context) error {
				return s.limiter.InTx(ctx, func(tx pgx.Tx) error {
					runs++
					return s.send(ctx, tx, "ada")
				})
			})
			test.meanwhile(t, s, s.awaitWaiter(t), open, inTx.cancel)
			<-inTx.ended
			require.ErrorIs(t, inTx.err, test.want)
			require.Equal(t, 1, runs)
			s.requireIdle(t)
			s.requireSent(t, test.sent)
			open()
			s.requireHealthy(t)
		})
	}
}
