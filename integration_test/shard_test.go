package integration_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// spread returns a limit of a token a second, whose buckets have a number of rows.
func spread(shards int, capacity float64) ratelimit.Limit {
	return ratelimit.Define(fmt.Sprintf("spread/%d", shards),
		ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: capacity, Shards: shards})
}

// stopped returns a limiter with a clock that the test sets.
func (b *bundle) stopped(t *testing.T) (*ratelimit.Limiter, *clock) {
	t.Helper()
	c := &clock{}
	c.set(clockNoon)
	return b.with(t, ratelimit.Config{AsOf: c.now}), c
}

// tokens returns what the bucket of a request holds.
func tokens(t *testing.T, limiter *ratelimit.Limiter, request ratelimit.Request) float64 {
	t.Helper()
	v, err := limiter.Value(t.Context(), request)
	require.NoError(t, err)
	return v.Tokens
}

// drain takes from a bucket until only left tokens remain.
func drain(t *testing.T, limiter *ratelimit.Limiter, request ratelimit.Request, left float64) {
	t.Helper()
	requireAllowed(t, taking(request.Cost(tokens(t, limiter, request)-left)), limiter)
}

// Outside a transaction a refusal locks and writes no row, as with one row, so that a caller with many refusals does not delay
// others.
func TestARefusalByShardsWritesNothing(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "the general path locks the rows to refuse")
	b := setup(t)
	limiter, _ := b.stopped(t)
	limit := spread(8, 64)
	drain(t, limiter, limit.For("key"), 7.5)
	versions := func() (all string) {
		require.NoError(t, b.pool.QueryRow(t.Context(),
			`SELECT string_agg(format('%s %s %s %s', shard, ctid, xmin, xmax), ', ' ORDER BY name, key, shard) FROM ratelimit.buckets`).Scan(&all))
		return all
	}
	before := versions()
	for range 4 {
		for _, requests := range [][]ratelimit.Request{
			{limit.For("key").Cost(8)},  // a row could hold it
			{limit.For("key").Cost(60)}, // all rows could
			{limit.For("key").Cost(8), other.For("new")},
			{limit.For("key").Cost(60), limit.For("new"), other.For("new")},
		} {
			d, err := limiter.Take(t.Context(), requests...)
			require.NoError(t, err)
			require.False(t, d.Allowed)
			require.Equal(t, before, versions())
		}
	}
}

// Full equals the database's answer for a sharded bucket without rows.
func TestFullOfABucketOfSeveralRows(t *testing.T) {
	t.Parallel()
	d, request := inMemory.setup(t).desk(t, ratelimit.Config{}), spread(8, 64).For("key")
	want, err := d.limiter.Value(t.Context(), request)
	require.NoError(t, err)
	require.Equal(t, want, request.Full(d.clock.now()))
}

// hangsUp is a transaction whose caller's context ends before so many of its requests.
type hangsUp struct {
	pgx.Tx
	before int
	hangUp context.CancelFunc
}

func (tx *hangsUp) count() {
	if tx.before--; tx.before == 0 {
		tx.hangUp()
	}
}

func (tx *hangsUp) Exec(ctx context.Context, sql string, arguments ...any) (pgconn.CommandTag, error) {
	tx.count()
	return tx.Tx.Exec(ctx, sql, arguments...)
}

func (tx *hangsUp) Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error) {
	tx.count()
	return tx.Tx.Query(ctx, sql, arguments...)
}

func (tx *hangsUp) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	tx.count()
	return tx.Tx.SendBatch(ctx, batch)
}

// The context of a call that ends between two of its requests leaves no half of it in the transaction.
func TestAnInterruptedShardedCallLeavesNoHalf(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "it interrupts the fast path, message by message")
	limit := spread(8, 64)
	for name, test := range map[string]struct {
		call     verb
		requests int // that it makes
	}{
		"RefusedByEachRow":    {taking(limit.For("key").Cost(8)), 4}, // take, undo, hold, undo
		"RefusedByAnotherOne": {taking(limit.For("key"), pinch.For("key").Cost(2)), 2},
		"TakenFromAllRows":    {taking(limit.For("key").Cost(4), other.For("key")), 4}, // take, undo, hold, save
		"Reserved":            {reserving(limit.For("key").Cost(100)), 3},              // hold, save, record
	} {
		for before := 2; before <= test.requests; before++ {
			t.Run(fmt.Sprint(name, before), func(t *testing.T) {
				t.Parallel()
				b := setup(t)
				limiter, _ := b.stopped(t)
				takeAll(t, limiter, pinch.For("key"))
				requireAllowed(t, taking(limit.For("key").Cost(64-7)), limiter)
				requireAllowed(t, resetting(other.For("key")), limiter)
				rows := b.rows(t, "")
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				tx := b.begin(t, pgx.Serializable)
				_, _ = test.call(ctx, limiter.WithTx(&hangsUp{Tx: tx, before: before, hangUp: cancel}))
				require.Error(t, ctx.Err(), "the call has to be interrupted")
				_ = tx.Commit(t.Context())
				require.Equal(t, rows, b.rows(t, ""))
			})
		}
	}
}

// Open transactions that take from one bucket all commit if each found a row of its own.
func TestTransactionsOnDifferentShardsDoNotConflict(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "the general path locks all rows of a bucket")
	transactions := testsize.Of(4, 8)
	b := setupOwn(t, nil, func(c *pgxpool.Config) { c.MaxConns = int32(transactions) + 1 })
	for _, limit := range []ratelimit.Limit{spread(1, 64), spread(64, 64)} {
		for _, level := range levels {
			for _, rowsExist := range []bool{true, false} {
				t.Run(fmt.Sprintf("%d/%s/RowsExist=%v", shardsOf(limit), level.name, rowsExist), func(t *testing.T) { // not parallel: others would be in conflict
					limiter, _ := b.stopped(t)
					request := limit.For(t.Name())
					if rowsExist {
						require.NoError(t, limiter.Reset(t.Context(), request))
					}
					var open []pgx.Tx
					for met := 0; len(open) < transactions; {
						tx := b.begin(t, level.level)
						_, err := tx.Exec(t.Context(), "SET LOCAL lock_timeout = '100ms'")
						require.NoError(t, err)
						d, err := limiter.WithTx(tx).Take(t.Context(), request)
						if sqlstate(err) != "55P03" {
							require.NoError(t, err)
							require.True(t, d.Allowed)
							open = append(open, tx)
							continue
						}
						require.NoError(t, tx.Rollback(t.Context()))
						if met++; shardsOf(limit) == 1 {
							require.Len(t, open, 1, "there is only one row")
							break
						}
						require.Less(t, met, 50, "somebody is on each row")
					}
					for _, tx := range open {
						require.NoError(t, tx.Commit(t.Context()))
					}
					require.Equal(t, float64(64-len(open)), tokens(t, limiter, request))
				})
			}
		}
	}
}

// Calls lock the rows they visit in one order, also if each row has too little, and if the requests for two limits have opposite
// orders.
func TestShardedTakesMeetNoDeadlock(t *testing.T) {
	t.Parallel()
	const workers, tries = 8, 2
	rounds := testsize.Of(2, 25)
	b := setup(t, func(c *pgxpool.Config) { c.MaxConns = 2 * workers })
	limiter, _ := b.stopped(t)
	left, right := spread(8, 6), ratelimit.Define("right", ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: 6, Shards: 8})
	keyOf := func(c caller, round int) string { return fmt.Sprintf("%s %d", c.name, round) }
	require.NoError(t, atonce.Do(workers*len(callers()), func(n int) error {
		i, worker := n/workers, n%workers
		for round := range rounds {
			key := keyOf(callers()[i], round)
			requests := []ratelimit.Request{left.For(key).Cost(0.5), right.For(key).Cost(0.5)}
			switch {
			case round%2 > 0:
				requests = requests[:1]
			case worker%2 > 0:
				slices.Reverse(requests)
			}
			with := callers()[i]
			if worker%4 > 1 { // beside another kind of caller
				with = callers()[(i+1)%len(callers())]
			}
			for range tries {
				if _, err := with.take(t.Context(), b.db(), limiter, requests...); err != nil {
					return fmt.Errorf("%s: %w", with.name, err)
				}
			}
		}
		return nil
	}))
	for _, c := range callers() {
		for round := range rounds { // twelve of the sixteen, of which one row has the tokens for eight
			key := keyOf(c, round)
			require.Zero(t, b.held(t, left.Name(), key), key)
			if round%2 == 0 {
				require.Zero(t, b.held(t, right.Name(), key), key)
			}
		}
	}
	require.Zero(t, deadlocks(t, b.pool))
}

// A row whose ts a wrong clock left in the future gains nothing until its ts is corrected. A refused call corrects it.
func TestAWrongClockOnOneShardIsMended(t *testing.T) {
	t.Parallel()
	b := setup(t)
	policies := []ratelimit.Limit{
		ratelimit.Define("bucket", ratelimit.TokenBucket{Rate: 8, Period: time.Minute, Capacity: 64, Shards: 8}),
		ratelimit.Define("window", ratelimit.FixedWindow{Rate: 8, Period: time.Minute, Capacity: 64, Start: clockNoon, Shards: 8}),
	}
	for _, limit := range policies {
		for _, c := range callers() {
			for _, cost := range []float64{8, 20} { // at most one row's tokens, and more than that
				t.Run(fmt.Sprintf("%s/%s/%v", limit.Name(), c.name, cost), func(t *testing.T) {
					t.Parallel()
					limiter, now := b.stopped(t)
					request := limit.For(t.Name())
					take := func(cost float64) ratelimit.Decision {
						d, err := c.take(t.Context(), b.db(), limiter, request.Cost(cost))
						require.NoError(t, err)
						return d
					}
					require.True(t, take(64).Allowed)
					b.exec(t, `UPDATE ratelimit.buckets SET ts = ts + $1 WHERE name = $2 AND key = $3 AND shard = 5`,
						ratelimit.Day.Microseconds(), limit.Name(), t.Name())
					now.set(clockNoon.Add(time.Minute))
					d := take(cost)
					require.False(t, d.Allowed)
					require.Equal(t, 7.0, d.Remaining)
					for _, r := range b.rows(t, t.Name()) {
						require.LessOrEqual(t, r.TS, now.now().UnixMicro())
					}
					now.set(clockNoon.Add(time.Minute + d.RetryAfter - time.Microsecond))
					require.False(t, take(cost).Allowed)
					now.set(clockNoon.Add(time.Minute + d.RetryAfter))
					require.True(t, take(cost).Allowed)
				})
			}
		}
	}
}

// shardsOf returns the number of rows of a limit's buckets.
func shardsOf(limit ratelimit.Limit) int {
	switch p := limit.Policy().(type) {
	case ratelimit.TokenBucket:
		return max(p.Shards, 1)
	case ratelimit.FixedWindow:
		return max(p.Shards, 1)
	}
	panic("no such policy")
}

// TestAHistoryOfChangesCountsEveryToken runs random calls on one bucket whose rate, capacity, kind and shards change between them.
// Each call changes the bucket's tokens, under the limit at that moment, by exactly the amount in its answer. Time adds the tokens
// that Value predicted. Nothing else adds or takes any.
func TestAHistoryOfChangesCountsEveryToken(t *testing.T) {
	t.Parallel()
	steps := testsize.Of(150, 600)
	policies := changedPolicies()
	names := make([]string, 0, len(policies))
	for name := range policies {
		names = append(names, name)
	}
	slices.Sort(names)
	testsize.EachSeed(t, func(t *testing.T, seed uint64) {
		h := &changeHistory{random: rand.New(rand.NewPCG(seed, 9)), desk: setup(t).desk(t, ratelimit.Config{}), policies: policies, names: names}
		h.change(t)
		for range steps {
			h.step(t)
		}
		require.Greater(t, h.ended, steps/20)
	})
}

type changeHistory struct {
	*desk
	random   *rand.Rand
	policies map[string]ratelimit.Policy
	names    []string
	now      ratelimit.Request
	open     []ratelimit.Reservation
	ended    int
}

// change changes the limit, which may cut what the bucket holds, or start rows full, and never fills it further.
func (h *changeHistory) change(t *testing.T) {
	t.Helper()
	policy := h.policies[h.names[h.random.IntN(len(h.names))]]
	h.now = ratelimit.Define("changing", policy).For("key")
	require.LessOrEqual(t, tokens(t, h.limiter, h.now), h.now.Limit().Capacity())
}

func (h *changeHistory) step(t *testing.T) {
	t.Helper()
	value, err := h.limiter.Value(t.Context(), h.now)
	require.NoError(t, err)
	held, cost := value.Tokens, float64(1+h.random.IntN(1+int(h.now.Limit().Capacity()/4)))
	switch n := h.random.IntN(20); {
	case n < 2:
		h.change(t)
	case n < 6:
		h.clock.set(h.clock.now().Add(time.Duration(h.random.ExpFloat64() * float64(time.Minute))).Truncate(time.Microsecond))
		h.holds(t, value.At(h.clock.now()), "time")
	case n < 10:
		d, err := h.limiter.Take(t.Context(), h.now.Cost(cost))
		require.NoError(t, err)
		switch {
		case held-cost > 1e-6:
			require.True(t, d.Allowed)
		case cost-held > 1e-6 && shardsOf(h.now.Limit()) == 1: // rows that began full give beside a row that owes
			require.False(t, d.Allowed)
		}
		if d.Allowed {
			held -= cost
		}
		h.holds(t, held, "take")
	case n < 14:
		h.open = append(h.open, h.reserve(t, h.now.Cost(cost)))
		h.holds(t, held-cost, "reserve")
	default:
		h.end(t, held)
	}
}

// holds checks what the bucket holds.
func (h *changeHistory) holds(t *testing.T, want float64, after string) {
	t.Helper()
	require.InDelta(t, want, tokens(t, h.limiter, h.now), 1e-6, "after %s of %v", after, h.now.Limit())
}

// end ends or renews a reservation, through the Limiter that uses the limit or a Limiter that never used it. The second may return
// tokens to rows of an earlier policy, but never more tokens.
func (h *changeHistory) end(t *testing.T, held float64) {
	t.Helper()
	if len(h.open) == 0 {
		return
	}
	i := h.random.IntN(len(h.open))
	r := h.open[i]
	reserved := r.States[0].Cost
	limiter, stranger := h.limiter, h.random.IntN(3) == 0
	if stranger {
		limiter = h.with(t, ratelimit.Config{AsOf: h.clock.now})
	}
	charged := 0.0
	switch h.random.IntN(4) {
	case 0:
		charged = -reserved
		require.NoError(t, limiter.Cancel(t.Context(), r.ID))
	case 1:
		require.NoError(t, limiter.Settle(t.Context(), r.ID))
	case 2:
		used := reserved * 2 * h.random.Float64()
		charged, stranger = used-reserved, false // the request tells it the limit
		require.NoError(t, limiter.Settle(t.Context(), r.ID, h.now.Cost(used)))
	default:
		if stranger {
			return
		}
		_, err := limiter.Renew(t.Context(), r.ID)
		require.NoError(t, err)
		h.holds(t, held-reserved, "renew")
		h.open = slices.Delete(h.open, i, i+1)
		return
	}
	h.open = slices.Delete(h.open, i, i+1)
	h.ended++
	want := min(h.now.Limit().Capacity(), held-charged)
	if w, ok := h.now.Limit().Policy().(ratelimit.FixedWindow); ok && charged < 0 && windowOf(w, r.ReadyAt) < windowOf(w, h.clock.now()) {
		want = held
	}
	if stranger {
		now := tokens(t, h.limiter, h.now)
		require.GreaterOrEqual(t, now, held-1e-6)
		require.LessOrEqual(t, now, min(h.now.Limit().Capacity(), held-charged)+1e-6)
		return
	}
	h.holds(t, want, "the end")
}
