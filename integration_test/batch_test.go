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
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func TestThoseWhoWaitForOneCallShareTheNextRoundTrip(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "the general path takes more round trips")
	w := &wire{}
	s := newStand(t, w.onEach)
	_, others, release := s.crowd(t, 50)
	look := askFor(t, func(ctx context.Context) (ratelimit.Decision, error) { return s.limiter.Check(ctx, calls.For("ada")) })
	look.requireAllowed(t) // takes nothing, and does not wait
	require.LessOrEqual(t, w.count(func() {
		release()
		for _, a := range others {
			a.requireAllowed(t)
		}
	}), 2, "it prepares the statement and executes it")
	require.Equal(t, 52, s.taken(t))
	s.requireHealthy(t)
}

func TestACallerWhoGivesUpLeavesTheOthersAlone(t *testing.T) {
	t.Parallel()
	s := newStand(t)
	first, others, release := s.crowd(t, 5)
	others[2].cancel()
	others[2].requireError(t, isError(context.Canceled)) // while the row is held
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := s.limiter.Take(ctx, calls.For("ada"))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	_, err = s.limiter.Take(ctx, calls.For("grace"))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	for i, a := range others {
		if i != 2 {
			a.requireWaits(t)
		}
	}
	release()
	first.requireAllowed(t)
	for i, a := range others {
		if i != 2 {
			a.requireAllowed(t)
		}
	}
	require.Equal(t, 1+1+4, s.taken(t), "those who gave up took nothing")
	s.requireHealthy(t)
}

func TestMaxWaitingIsRefusedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	w := &wire{}
	s := newStand(t, w.onEach)
	s.limiter = s.with(t, ratelimit.Config{MaxWaiting: 6})
	first, others, release := s.crowd(t, 3)
	eventually(t, "the line behind the row is full", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		_, err := s.limiter.Take(ctx, calls.For("ada"))
		return errors.Is(err, ratelimit.ErrOverloaded)
	})
	before := w.Trips()
	for name, call := range map[string]verb{
		"Take": writes["Take"], "TakeSeveral": writes["TakeSeveral"], "Reserve": writes["Reserve"],
	} {
		allowed, err := call(t.Context(), s.limiter)
		require.ErrorIs(t, err, ratelimit.ErrOverloaded, name)
		require.ErrorContains(t, err, "too many calls are waiting for the database; shed load, or raise Config.MaxWaiting (6)")
		require.False(t, allowed)
	}
	require.Equal(t, before, w.Trips())
	_, err := s.limiter.Take(t.Context(), calls.For("grace"))
	require.NoError(t, err, "it has not to wait")
	release()
	first.requireAllowed(t)
	for _, a := range others {
		a.requireAllowed(t)
	}
	require.Equal(t, 1+1+3+1, s.taken(t))
	s.requireHealthy(t)
}

func TestClose(t *testing.T) {
	t.Parallel()
	for name, config := range map[string]ratelimit.Config{"Batching": {}, "NoBatching": {NoBatching: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStand(t)
			s.limiter = s.with(t, config)
			r, err := s.limiter.Reserve(t.Context(), calls.For("ada"))
			require.NoError(t, err)
			release := s.hold(t)
			askers := []*asker{ask(t, s.limiter, calls.For("ada")), ask(t, s.limiter, calls.For("ada"))}
			eventually(t, "a call is at the server", func() bool { return waiting(t, s.outside.pool) > 0 })
			short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			require.ErrorIs(t, s.limiter.Close(short), context.DeadlineExceeded)
			for name, call := range map[string]verb{
				"Take": writes["Take"], "TakeSeveral": writes["TakeSeveral"], "Reserve": writes["Reserve"],
				"Check": reads["Check"], "Value": reads["Value"],
			} {
				_, err := call(t.Context(), s.limiter)
				require.ErrorIs(t, err, ratelimit.ErrClosed, name)
			}
			closed := make(chan error)
			go func() { closed <- s.limiter.Close(t.Context()) }()
			release()
			for _, a := range askers {
				a.requireAllowed(t)
			}
			require.NoError(t, <-closed)
			require.NoError(t, s.limiter.Close(t.Context()))
			require.NoError(t, s.limiter.Close(short), "there is nothing to wait for")
			require.Zero(t, s.pool.Stat().AcquiredConns())

			require.NoError(t, s.limiter.InTx(t.Context(), func(tx pgx.Tx) error { return s.send(t.Context(), tx, "ada") }))
			require.NoError(t, pgx.BeginFunc(t.Context(), s.pool, func(tx pgx.Tx) error { return s.send(t.Context(), tx, "ada") }))
			require.NoError(t, s.limiter.Settle(t.Context(), r.ID), "what is under way can be ended")
			require.Equal(t, 5, s.taken(t))
			require.ErrorIs(t, s.limiter.WithTx(s.begin(t, pgx.ReadCommitted)).Close(t.Context()), ratelimit.ErrInvalidConfig)
		})
	}
}

// If a batch fails for any reason, all of its calls get the error at once, nothing was taken, and the next batch works.
func TestABatchThatFailsRefusesAllOfIt(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]struct {
		end, code string
	}{
		"BackendKilled":      {"pg_terminate_backend", "57P01"},
		"StatementCancelled": {"pg_cancel_backend", "57014"}, // as a statement_timeout does
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStand(t)
			first, others, release := s.crowd(t, 6)
			several := ask(t, s.limiter, calls.For("ada"), calls.For("grace"))
			reserving := askFor(t, func(ctx context.Context) (ratelimit.Decision, error) {
				r, err := s.limiter.Reserve(ctx, calls.For("ada"))
				return r.Decision, err
			})
			for _, a := range append([]*asker{first, several, reserving}, others...) {
				eventually(t, "the call fails", func() bool {
					s.outside.exec(t, `SELECT `+fault.end+`(pid) FROM pg_stat_activity
						WHERE datname = current_database() AND wait_event_type = 'Lock'`)
					return a.hasEnded()
				})
				a.requireError(t, isState(fault.code))
			}
			release()
			require.Equal(t, 1, s.taken(t), "what was taken before")
			require.Zero(t, s.outside.count(t, `SELECT count(*) FROM ratelimit.reservations`))
			s.requireHealthy(t)
		})
	}
}

// An application that takes in a transaction, in another order than calls lock in, cannot deadlock with calls outside of it. These
// take from both buckets, or share a batch with calls for the other.
func TestABatchIsPartOfNoDeadlock(t *testing.T) {
	t.Parallel()
	s := newStand(t)
	heal := s.setDefault(t, "deadlock_timeout", "50ms") // Postgres ends one of those in a deadlock with an error
	defer heal()
	const rounds = 5
	for round := range rounds {
		tx := s.begin(t, pgx.ReadCommitted)
		bound := s.limiter.WithTx(tx)
		_, err := bound.Take(t.Context(), calls.For("z")) // makes the row in the first round
		require.NoError(t, err)
		both := ask(t, s.limiter, calls.For("a"), calls.For("z"))
		s.awaitWaiter(t)
		behind := ask(t, s.limiter, calls.For("z"))
		ask(t, s.limiter, calls.For("a")).requireAllowed(t)
		_, err = bound.Take(t.Context(), calls.For("a"))
		require.NoError(t, err, "round %d", round)
		both.requireWaits(t)
		behind.requireWaits(t)
		require.NoError(t, tx.Commit(t.Context()))
		both.requireAllowed(t)
		behind.requireAllowed(t)
	}
	require.Equal(t, 6*rounds, s.taken(t))
	s.requireHealthy(t)
}

// A reset allows at most a full bucket again, also beside calls in progress.
func TestResetsBesideBatchesAdmitNoMoreThanTheyRestore(t *testing.T) {
	t.Parallel()
	const resets, capacity = 5, 20
	callers, each := testsize.Of(12, 24), testsize.Of(20, 40)
	b := setup(t)
	limit := ratelimit.Define("limit", hoard(capacity))
	var admitted atomic.Int64
	require.NoError(t, atonce.Do(callers, func(caller int) error {
		for i := range each {
			if caller == 0 && i%(each/resets) == 0 {
				if err := b.limiter.Reset(t.Context(), limit.For("key")); err != nil {
					return err
				}
			}
			d, err := b.limiter.Take(t.Context(), limit.For("key"))
			if err != nil {
				return err
			}
			if d.Allowed {
				admitted.Add(1)
			}
		}
		return nil
	}))
	require.LessOrEqual(t, admitted.Load(), int64(capacity*(1+resets)))
	require.GreaterOrEqual(t, admitted.Load(), int64(capacity))
}

// The first callers of new keys meet at rows that are not there, or that are being deleted because they are full.
func TestBatchesOfFirstCallersBesidePrune(t *testing.T) {
	t.Parallel()
	const keys, capacity = 60, 3
	callers := testsize.Of(8, 24)
	b := setup(t)
	limit := ratelimit.Define("limit", hoard(capacity))
	b.exec(t, `INSERT INTO ratelimit.buckets SELECT 'limit', 'key' || n, 0, 3, 0 FROM generate_series(1, 60, 2) AS n`) // full long since
	var admitted [keys]atomic.Int64
	pruned := make(chan error, 1)
	ctx, stop := context.WithCancel(t.Context())
	go func() {
		for ctx.Err() == nil {
			if _, err := b.limiter.Prune(t.Context(), limit); err != nil {
				pruned <- err
				return
			}
		}
		pruned <- nil
	}()
	err := atonce.Do(callers, func(int) error {
		for i := range keys {
			d, err := b.limiter.Take(t.Context(), limit.For(fmt.Sprint("key", i)))
			if err != nil {
				return err
			}
			if d.Allowed {
				admitted[i].Add(1)
			}
		}
		return nil
	})
	stop()
	require.NoError(t, errors.Join(err, <-pruned))
	for i := range keys {
		require.EqualValues(t, capacity, admitted[i].Load(), "key %d", i)
	}
}

// Batches are exact for each kind of connection.
func TestBatchesAreExactOnAnyConnection(t *testing.T) {
	t.Parallel()
	serializable := func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable" }
	mode := func(m pgx.QueryExecMode) func(*pgxpool.Config) {
		return func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = m }
	}
	for name, configure := range map[string]func(*pgxpool.Config){
		"OneConnection":  oneConnection,
		"Serializable":   serializable,
		"CacheStatement": mode(pgx.QueryExecModeCacheStatement),
		"CacheDescribe":  mode(pgx.QueryExecModeCacheDescribe),
		"DescribeExec":   mode(pgx.QueryExecModeDescribeExec),
		"Exec":           mode(pgx.QueryExecModeExec),
		"SimpleProtocol": mode(pgx.QueryExecModeSimpleProtocol),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, hot := setup(t, configure), ratelimit.Define("hot", hoard(raceCapacity))
			for _, several := range []bool{false, true} {
				b.race(t, callers()[3], hot, racersTries, fmt.Sprint("ключ's \\ ", several), several)
			}
		})
	}
	t.Run("SingleConnection", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		conn, err := pgx.ConnectConfig(t.Context(), b.pool.Config().ConnConfig)
		require.NoError(t, err)
		defer conn.Close(context.WithoutCancel(t.Context()))
		limiter, err := ratelimit.New(conn, ratelimit.Config{})
		require.NoError(t, err)
		for i := range 4 {
			d, err := limiter.Take(t.Context(), pinch.For("key"))
			require.NoError(t, err)
			require.Equal(t, i < 2, d.Allowed)
		}
		require.NoError(t, limiter.Close(t.Context()))
		_, err = limiter.Take(t.Context(), pinch.For("key"))
		require.ErrorIs(t, err, ratelimit.ErrClosed)
	})
}

// A refusal outside a transaction writes nothing at all, also when many are refused at once.
func TestRefusalsInBatchesLogNothing(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "the general path locks rows to refuse what a look did not")
	s, _ := setupOwn(t, map[string]string{
		"autovacuum": "off", "checkpoint_timeout": "1h", "wal_level": "minimal", "max_wal_senders": "0",
	})
	requests := [][]ratelimit.Request{
		{tight.For("a")},
		{tight.For("b").Cost(0.3)},
		{roomy.For("new"), tight.For("a")},
		{tight.For("a"), tight.For("b"), other.For("new")},
	}
	takeAll(t, s.limiter, tight.For("a"))
	takeAll(t, s.limiter, tight.For("b"))
	s.exec(t, "VACUUM ratelimit.buckets") // reading a page tidies it, once
	refuse := func() {
		require.NoError(t, atonce.Do(32, func(caller int) error {
			for i := range 20 {
				d, err := s.limiter.Take(t.Context(), requests[(caller+i)%len(requests)]...)
				if err != nil || d.Allowed {
					return fmt.Errorf("%+v, %w", d, err)
				}
			}
			return nil
		}))
	}
	logged := func() (position string) {
		require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT pg_current_wal_insert_lsn()::text`).Scan(&position))
		return position
	}
	refuse()
	before, rows := logged(), s.rows(t, "")
	refuse()
	require.Equal(t, before, logged())
	require.Equal(t, rows, s.rows(t, ""))
	takeAll(t, s.limiter, tight.For("c"))
	require.NotEqual(t, before, logged(), "what is taken is logged")
}
