package integration_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Callers who wait for one row share the next round trip, up to MaxWaiting of them. Who comes after them is refused before any SQL.
func TestThoseWhoWaitForOneCallShareTheNextRoundTrip(t *testing.T) {
	t.Parallel()
	w := &wire{}
	s := newStand(t, w.onEach)
	askers, release := s.crowd(t, 20)
	requireAllAllowed(t, askFor(t, func(ctx context.Context) error { // takes nothing, and does not wait
		return errOf(s.limiter.Check(ctx, calls.For("ada")))
	}))
	trips := w.count(func() { release(); requireAllAllowed(t, askers...) })
	require.True(t, generalPath || trips <= 2, "%d round trips: more than one to prepare the statement and one to execute it", trips)
	require.Equal(t, 1+len(askers), s.taken(t))
	s.requireHealthy(t)
}

func TestMaxWaitingIsRefusedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	w := &wire{}
	s := newStand(t, w.onEach)
	s.limiter = s.with(t, ratelimit.Config{MaxWaiting: 6})
	askers, release := s.crowd(t, 3)
	eventually(t, "the line behind the row is full", func() bool { // with calls that give up, which take nothing
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		return errors.Is(s.limiter.Require(ctx, calls.For("ada")), ratelimit.ErrOverloaded)
	})
	require.Zero(t, w.count(func() {
		for _, name := range []string{"Take", "TakeSeveral", "Reserve"} {
			err := errOf(writes[name](t.Context(), s.limiter))
			require.ErrorIs(t, err, ratelimit.ErrOverloaded, name)
			require.ErrorContains(t, err, "too many calls are waiting for the database; shed load, or raise Config.MaxWaiting (6)")
		}
	}))
	takeOne(t, s.limiter, calls.For("grace")) // which need not wait
	release()
	requireAllAllowed(t, askers...)
	require.Equal(t, 1+len(askers)+1, s.taken(t))
	s.requireHealthy(t)
}

// An application that takes in a transaction, in another order than calls lock in, cannot deadlock with calls outside of it. These
// take from both buckets, or share a batch with calls for the other.
func TestABatchIsPartOfNoDeadlock(t *testing.T) {
	t.Parallel()
	s := newStand(t)
	defer s.setDefault(t, "deadlock_timeout", "50ms")() // Postgres ends one of those in a deadlock with an error
	const rounds = 5
	for range rounds {
		tx := s.begin(t, pgx.ReadCommitted)
		takeOne(t, s.limiter.WithTx(tx), calls.For("z")) // makes the row in the first round
		both := ask(t, s.limiter, calls.For("a"), calls.For("z"))
		s.awaitWaiter(t)
		behind := ask(t, s.limiter, calls.For("z"))
		requireAllAllowed(t, ask(t, s.limiter, calls.For("a")))
		takeOne(t, s.limiter.WithTx(tx), calls.For("a"))
		requireWaiting(t, both, behind)
		require.NoError(t, tx.Commit(t.Context()))
		requireAllAllowed(t, both, behind)
	}
	require.Equal(t, 6*rounds, s.taken(t))
	s.requireHealthy(t)
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
	var taking atomic.Int64
	taking.Store(int64(callers))
	require.NoError(t, atonce.Do(callers+1, func(caller int) error {
		for caller == callers && taking.Load() > 0 {
			if err := errOf(b.limiter.Prune(t.Context(), limit)); err != nil {
				return err
			}
		}
		if caller == callers {
			return nil
		}
		defer taking.Add(-1)
		for i := range keys {
			switch err := b.limiter.Require(t.Context(), limit.For(fmt.Sprint("key", i))); {
			case err == nil:
				admitted[i].Add(1)
			case !errors.Is(err, ratelimit.ErrLimited):
				return err
			}
		}
		return nil
	}))
	for i := range keys {
		require.EqualValues(t, capacity, admitted[i].Load(), "key %d", i)
	}
}

// A refusal outside a transaction writes nothing at all, also when many are refused at once.
func TestRefusalsInBatchesLogNothing(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "the general path locks rows to refuse what a look did not")
	s := setupOwn(t, map[string]string{
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
	refuse := func() (position string) {
		require.NoError(t, atonce.Do(32, func(caller int) error {
			for i := range 20 {
				err := s.limiter.Require(t.Context(), requests[(caller+i)%len(requests)]...)
				if !errors.Is(err, ratelimit.ErrLimited) {
					return fmt.Errorf("not refused: %w", err)
				}
			}
			return nil
		}))
		require.NoError(t, s.pool.QueryRow(t.Context(), `SELECT pg_current_wal_insert_lsn()::text`).Scan(&position))
		return position
	}
	before, rows := refuse(), s.rows(t, "")
	require.Equal(t, before, refuse())
	require.Equal(t, rows, s.rows(t, ""))
	takeAll(t, s.limiter, tight.For("c"))
	require.NotEqual(t, before, refuse(), "what is taken is logged")
}
