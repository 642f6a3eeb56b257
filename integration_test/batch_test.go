package integration_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
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

// An application that takes in a transaction, in another order than calls lock in, cannot deadlock with calls outside
// of it. These take from both buckets, or share a batch with calls for the other.
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
	callers := testkit.Sized(8, 24)
	b := setup(t)
	limit := ratelimit.Define("limit", hoard(capacity))
	b.exec(t, `INSERT INTO ratelimit.buckets SELECT 'limit', 'key' || n, 0, 3, 0, 3 FROM generate_series(1, 60, 2) AS n`) // full long since
	var admitted [keys]atomic.Int64
	var ended atomic.Int64
	require.NoError(t, atonce.Do(callers+1, func(caller int) error {
		if caller == callers {
			var err error
			for err == nil && ended.Load() < int64(callers) {
				_, err = b.limiter.Prune(t.Context(), limit)
			}
			return err
		}
		defer ended.Add(1)
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
	}))
	for i := range keys {
		require.EqualValues(t, capacity, admitted[i].Load(), "key %d", i)
	}
}

// A refusal outside a transaction writes nothing at all, also when many are refused at once.
func TestRefusalsInBatchesLogNothing(t *testing.T) {
	t.Parallel()
	s := setupQuiet(t)
	requests := [][]ratelimit.Request{
		{tight.For("a")},
		{tight.For("b").Cost(0.3)},
		{roomy.For("new"), tight.For("a")},
		{tight.For("a"), tight.For("b"), other.For("new")},
		{wide.For("a").Cost(8)},   // a row could hold it
		{wide.For("a").Cost(2e5)}, // all rows could
		{wide.For("a").Cost(8), other.For("new")},
		{wide.For("a").Cost(2e5), wide.For("new"), other.For("new")},
	}
	drain(t, s.limiter, wide.For("a"), 7.5)
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

// sliced is a sliding window that gains nothing while a test runs.
var sliced = ratelimit.Define("sliced", ratelimit.SlidingWindow{Rate: callsCapacity, Period: ratelimit.Day, Slices: 24})

// cutCall is a call for a bucket of each of its limits, all with the same key.
type cutCall struct {
	limits []ratelimit.Limit
	verb   func(requests ...ratelimit.Request) verb
	cost   float64 // which it takes of each
	// commits says that after an error other than ErrCommitUnknown nothing was taken.
	commits bool
}

// cutCrowd are calls of each kind, which are made at once. Some of them share a statement. There is nothing left of
// tight.
var cutCrowd = []cutCall{
	{[]ratelimit.Limit{calls}, taking, 1, false},
	{[]ratelimit.Limit{calls}, taking, 1, false},
	{[]ratelimit.Limit{calls, roomy}, taking, 1, false},
	{[]ratelimit.Limit{sliced}, taking, 1, false},
	{[]ratelimit.Limit{sliced}, taking, 1, false},
	{[]ratelimit.Limit{shardedCalls}, taking, 1, false},
	{[]ratelimit.Limit{calls, roomy}, reserving, 1, true},
	{[]ratelimit.Limit{calls, tight}, taking, 0, false},
	{[]ratelimit.Limit{roomy, calls, other}, taking, 1, false},
}

// requests returns the requests of the call.
func (c cutCall) requests(key string) (all []ratelimit.Request) {
	for _, limit := range c.limits {
		all = append(all, limit.For(key))
	}
	return all
}

// Wherever the connection of a batch breaks, each of its callers gets an error or an answer. An answer is true. A call
// with an error has taken all of its cost or nothing. The next batch works.
func TestABatchWithABrokenConnectionIsAllOrNothing(t *testing.T) {
	t.Parallel()
	for name, side := range map[string]cut{
		"BeforeTheRequest": cutRequest, "InTheRequest": cutHalfRequest, "AtTheAnswer": cutAnswer, "InTheAnswer": cutHalfAnswer,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cutter := &cutter{}
			s := newStand(t, cutter.on, oneConnection, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheStatement })
			require.NoError(t, s.outside.limiter.Credit(t.Context(), calls.For("first"))) // stores the fingerprint
			n := 1
			for s.cutAt(t, cutter, n, side) {
				n++
			}
			require.Greater(t, n, 4, "a call alone, and the parts of a batch")
			s.requireHealthy(t)
		})
	}
}

// cutAt breaks the connection of a crowd at the n-th request that it sends, and reports whether it sent so many.
func (s *stand) cutAt(t *testing.T, cutter *cutter, n int, side cut) (reached bool) {
	t.Helper()
	key := func(i int) string { return fmt.Sprint(n, " ", i) }
	conn, err := s.pool.Acquire(t.Context()) // so that all calls are there before the first is sent
	require.NoError(t, err)
	askers := make([]*asker, len(cutCrowd))
	for i, c := range cutCrowd {
		if slices.Contains(c.limits, tight) {
			takeAll(t, s.outside.limiter, tight.For(key(i)))
		}
		askers[i] = startAsking(t, func(ctx context.Context) (bool, error) { return c.verb(c.requests(key(i))...)(ctx, s.limiter) })
		if i == 0 {
			askers[0].awaitUnderway() // it goes alone; the others come together, before a busy machine takes its batch for slow
		}
	}
	for _, a := range askers {
		a.awaitUnderway()
	}
	cutter.armAt(n, side, nil)
	conn.Release()
	for _, a := range askers {
		eventually(t, "each call has its answer", a.hasEnded)
	}
	reached = cutter.seen() >= n
	cutter.arm("", 0, 0)
	reservations := 0
	for i, c := range cutCrowd {
		a := askers[i]
		require.True(t, reached || a.err == nil, "call %d: %v", i, a.err)
		taken := s.takenBy(t, c, key(i))
		if a.err == nil || c.commits && !errors.Is(a.err, ratelimit.ErrCommitUnknown) {
			require.Equal(t, a.allowed && a.err == nil, taken > 0, "call %d: allowed %t, %v, and %v is taken", i, a.allowed, a.err, taken)
		}
		require.Contains(t, []float64{0, c.cost}, taken, "call %d", i)
		if len(c.limits) > 1 && c.commits && taken > 0 {
			reservations++
		}
	}
	require.Equal(t, reservations, s.outside.count(t, `SELECT count(*) FROM ratelimit.reservations WHERE key LIKE $1`, fmt.Sprint(n, " %")))
	_, _ = s.limiter.Take(t.Context(), calls.For("after")) // finds out that the connection is broken
	takeOne(t, s.limiter, calls.For("after"))
	return reached
}

// takenBy returns how many tokens a call has taken, which must be as many of each of its buckets.
func (s *stand) takenBy(t *testing.T, c cutCall, key string) (taken float64) {
	t.Helper()
	for i, request := range c.requests(key) {
		if request.Limit() == tight {
			continue
		}
		of := math.Round(request.Limit().Capacity() - tokens(t, s.outside.limiter, request))
		require.True(t, i == 0 || of == taken, "%v of %s, %v of another limit", of, request.Limit().Name(), taken)
		taken = of
	}
	return taken
}

// echoing is a pool whose server answers the statements that only read with every row twice, as a database that
// keeps the table in several places may.
type echoing struct{ ratelimit.Pool }

func twice(sql string) string {
	return "SELECT q.* FROM (" + sql + ") AS q, generate_series(1, 2)"
}

func (p echoing) Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error) {
	return p.Pool.Query(ctx, twice(sql), arguments...)
}

func (p echoing) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	last := batch.QueuedQueries[batch.Len()-1]
	last.SQL = twice(last.SQL)
	return p.Pool.SendBatch(ctx, batch)
}

func TestMoreRowsThanAskedAreAnError(t *testing.T) {
	t.Parallel()
	b := setup(t)
	alone, err := ratelimit.New(echoing{b.pool}, ratelimit.Config{NoBatching: true})
	require.NoError(t, err)
	batched, err := ratelimit.New(echoing{b.pool}, ratelimit.Config{})
	require.NoError(t, err)
	for name, call := range map[string]verb{
		"Value":        valuing(roomy.For("key")),
		"Check":        checking(roomy.For("key"), other.For("key")),
		"ShardedValue": valuing(wide.For("key")),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := call(t.Context(), alone)
			require.ErrorContains(t, err, "rows")
			require.ErrorContains(t, atonce.Do(8, func(int) error { return errOf(call(t.Context(), batched)) }), "rows")
		})
	}
}
