package integration_test

import (
	"context"
	"fmt"
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

// spread is a bucket of a token a second over so many rows.
func spread(shards int, capacity float64) ratelimit.Limit {
	return ratelimit.Define(fmt.Sprintf("spread/%d", shards),
		ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: capacity, Shards: shards})
}

// stopped returns a limiter on a clock of the test's own.
func (b *bundle) stopped(t *testing.T) (*ratelimit.Limiter, *clock) {
	t.Helper()
	c := &clock{}
	c.set(clockNoon)
	return b.with(t, ratelimit.Config{AsOf: c.now}), c
}

// A call over several limits takes from all or from none, for any sharded limits among them. After a refusal the rows of the other
// limits are unchanged.
func TestShardedLimitsAmongOthersAreAllOrNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limiter, _ := b.stopped(t)
	few, many := spread(2, 8), spread(64, 64)
	for _, c := range callers() {
		for name, test := range map[string]struct {
			drained ratelimit.Limit // to half a token
			asks    func(key string) []ratelimit.Request
			refuses int // the index of the limit that refuses
		}{
			"AnUnshardedOneRefuses": {pinch, func(key string) []ratelimit.Request {
				return []ratelimit.Request{many.For(key), pinch.For(key), few.For(key), other.For(key)}
			}, 1},
			"AShardedOneRefuses": {few, func(key string) []ratelimit.Request {
				return []ratelimit.Request{many.For(key), pinch.For(key), few.For(key), other.For(key)}
			}, 2},
			"AShardedOneRefusesWhatItsRowsCannotHold": {few, func(key string) []ratelimit.Request {
				return []ratelimit.Request{many.For(key).Cost(40), pinch.For(key), few.For(key).Cost(7), other.For(key)}
			}, 2},
			"AShardedOneRefusesBesideAShardedOne": {many, func(key string) []ratelimit.Request {
				return []ratelimit.Request{few.For(key), many.For(key)}
			}, 1},
		} {
			t.Run(c.name+"/"+name, func(t *testing.T) {
				t.Parallel()
				if c.name != "Standalone" {
					representative(t, name, "AShardedOneRefusesWhatItsRowsCannotHold")
				}
				key, requests := t.Name()+" ", test.asks(t.Name()+" ")
				for _, limit := range []ratelimit.Limit{few, many, pinch, other} {
					require.NoError(t, limiter.Reset(t.Context(), limit.For(key)))
				}
				requireAllowed(t, taking(many.For(key).Cost(0.5), few.For(key).Cost(1.5)), limiter) // so that rows differ
				drain(t, limiter, test.drained.For(key), 0.5)
				before := b.rows(t, key)
				for range 8 { // each asks other rows
					d, err := c.take(t.Context(), b.db(), limiter, requests...)
					require.NoError(t, err)
					require.False(t, d.Allowed)
					require.Positive(t, d.RetryAfter)
					for i, s := range d.States {
						require.Equal(t, i == test.refuses, !s.Allowed, "%s", s.Limit)
						require.Equal(t, i == test.refuses, s.RetryAfter > 0, "%s", s.Limit)
					}
					require.Equal(t, d.States[test.refuses].RetryAfter, d.RetryAfter)
					require.Equal(t, before, b.rows(t, key))
				}
				require.NoError(t, limiter.Reset(t.Context(), test.drained.For(key)))
				held := make([]float64, len(requests))
				for i, r := range requests {
					held[i] = tokens(t, limiter, r)
				}
				d, err := c.take(t.Context(), b.db(), limiter, requests...)
				require.NoError(t, err)
				require.True(t, d.Allowed)
				for i, s := range d.States {
					require.InDelta(t, held[i]-s.Cost, tokens(t, limiter, requests[i]), 1e-9, "%s", s.Limit)
				}
			})
		}
	}
}

// tokens returns what the bucket of a request holds.
func tokens(t *testing.T, limiter *ratelimit.Limiter, request ratelimit.Request) float64 {
	t.Helper()
	v, err := limiter.Value(t.Context(), request)
	require.NoError(t, err)
	return v.Tokens
}

// drain takes from a bucket until only left is in it.
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

// Transactions that are open at the same time take from one bucket and all commit, where each found a row of
// its own.
func TestTransactionsOnDifferentShardsDoNotConflict(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "the general path locks all rows of a bucket")
	transactions := testsize.Of(4, 8)
	b, _ := setupOwn(t, nil, func(c *pgxpool.Config) { c.MaxConns = int32(transactions) + 1 })
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
