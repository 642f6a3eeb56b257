package integration_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
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

// For any costs in any order, the given and the remaining tokens add up to the capacity.
func TestShardsGiveEveryCostItsTokens(t *testing.T) {
	t.Parallel()
	const tries = 6
	seed := testsize.Seed(t)
	b := setup(t, func(c *pgxpool.Config) { c.MaxConns = 2 * racers })
	limiter, _ := b.stopped(t)
	for _, shards := range []int{2, 8, 64} {
		for _, c := range callers() {
			t.Run(fmt.Sprintf("%d/%s", shards, c.name), func(t *testing.T) {
				t.Parallel()
				if shards != 8 {
					testsize.Long(t, "eight rows are the same code")
				}
				limit, key := spread(shards, 64), t.Name()
				costs := []float64{0.125, 1, 6.5, 32, 57.5, 64}
				requireAllowed(t, taking(limit.For(key).Cost(1)), limiter)
				var mu sync.Mutex
				given := 1.0
				require.NoError(t, atonce.Do(racers, func(racer int) error {
					random := rand.New(rand.NewPCG(seed, uint64(racer)))
					for range tries {
						cost := costs[random.IntN(len(costs))]
						d, err := c.take(t.Context(), b.db(), limiter, limit.For(key).Cost(cost))
						if err != nil {
							return err
						}
						if d.Allowed {
							mu.Lock()
							given += cost
							mu.Unlock()
						}
					}
					return nil
				}))
				require.Equal(t, 64-given, tokens(t, limiter, limit.For(key)))
				if given < 64 {
					d, err := c.take(t.Context(), b.db(), limiter, limit.For(key).Cost(64-given))
					require.NoError(t, err)
					require.True(t, d.Allowed, "all that is there can be taken at once")
				}
				require.Zero(t, b.held(t, limit.Name(), key))
			})
		}
	}
}

// A call is refused when the rows are short together, until the instant at which they are not any more, and at
// no other time, however uneven they are.
func TestNoCostStarvesBesideSmallerOnes(t *testing.T) {
	t.Parallel()
	const capacity = 16
	b := setup(t)
	for _, shards := range []int{2, 8, 64} {
		for _, c := range callers() {
			for _, cost := range []float64{1, capacity / 2, 14.5, capacity} {
				t.Run(fmt.Sprintf("%d/%s/%v", shards, c.name, cost), func(t *testing.T) {
					t.Parallel()
					representative(t, fmt.Sprint(shards, cost), "8 14.5", "64 16")
					limiter, now := b.stopped(t)
					limit, key := spread(shards, capacity), t.Name()
					take := func(cost float64) ratelimit.Decision {
						d, err := c.take(t.Context(), b.db(), limiter, limit.For(key).Cost(cost))
						require.NoError(t, err)
						return d
					}
					for left := capacity - 0.25; left >= cost-0.25; left -= 0.25 { // in small change, from rows at random
						require.True(t, take(0.25).Allowed)
					}
					d := take(cost)
					require.False(t, d.Allowed)
					require.GreaterOrEqual(t, d.RetryAfter, 250*time.Millisecond, "one row gets a token a second")
					require.LessOrEqual(t, d.RetryAfter, time.Duration(shards)*capacity*time.Second)
					start := now.now()
					now.set(start.Add(d.RetryAfter - time.Microsecond))
					require.False(t, take(cost).Allowed)
					now.set(start.Add(d.RetryAfter))
					require.True(t, take(cost).Allowed)
					require.InDelta(t, 0, tokens(t, limiter, limit.For(key)), 1e-4)
				})
			}
		}
	}
}

// An allowed call reports an estimate from the row that gave. Everything else reports the sum over the rows: a refusal, a look and
// a call that takes from all rows.
func TestShardsReportTheirSum(t *testing.T) {
	t.Parallel()
	onEach(t, testShardsReportTheirSum, onPostgres, inMemory)
}

func testShardsReportTheirSum(t *testing.T, on backend) {
	b := on.setup(t)
	for _, c := range callers() {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			limiter, now := b.stopped(t)
			limit, key := spread(8, 64), t.Name()
			for taken := 1.0; taken < 64; taken++ {
				d, err := c.take(t.Context(), b.db(), limiter, limit.For(key))
				require.NoError(t, err)
				require.True(t, d.Allowed)
				if taken == 1 || b.memory != nil {
					require.Equal(t, 64-taken, d.Remaining)
				}
				require.GreaterOrEqual(t, d.Remaining, 0.0)
				require.LessOrEqual(t, d.Remaining, 64.0)
				v, err := limiter.Value(t.Context(), limit.For(key))
				require.NoError(t, err)
				require.Equal(t, 64-taken, v.Tokens)
				require.Equal(t, 64-taken, v.At(now.now()))
				require.Equal(t, 64.0, v.At(now.now().Add(64*time.Second)))
				checked, err := limiter.Check(t.Context(), limit.For(key).Cost(64-taken))
				require.NoError(t, err)
				require.True(t, checked.Allowed)
				require.Equal(t, 64-taken, checked.Remaining, "it takes nothing")
				checked, err = limiter.Check(t.Context(), limit.For(key).Cost(64.5-taken))
				require.NoError(t, err)
				require.False(t, checked.Allowed)
			}
			d, err := c.take(t.Context(), b.db(), limiter, limit.For(key).Cost(1.5))
			require.NoError(t, err)
			require.False(t, d.Allowed)
			require.Equal(t, 1.0, d.Remaining)
			v, err := limiter.Value(t.Context(), limit.For(key))
			require.NoError(t, err)
			wait, err := v.RetryAfter(now.now(), 1.5)
			require.NoError(t, err)
			require.Equal(t, wait, d.RetryAfter)
			require.Positive(t, d.ResetAfter)
		})
	}
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

// A transaction that takes from a sharded bucket twice comes back to the row that it has locked. If it continued with any other
// row, it could deadlock with a transaction that comes from there.
func TestATransactionStaysWithItsRow(t *testing.T) {
	t.Parallel()
	const workers, rounds, each = 8, 25, 4
	b := setup(t, func(c *pgxpool.Config) { c.MaxConns = workers })
	limiter, _ := b.stopped(t)
	limit := spread(16, 1<<16)
	for _, level := range levels {
		require.NoError(t, atonce.Do(workers, func(int) error {
			for range rounds {
				_, err := atonce.Tx(t.Context(), b.db(), level.level, func(tx pgx.Tx) error {
					for range each {
						if err := takeAndCheck(t.Context(), limiter.WithTx(tx), []ratelimit.Request{limit.For(level.name)}); err != nil {
							return err
						}
					}
					return nil
				})
				if err != nil {
					return err
				}
			}
			return nil
		}))
		require.EqualValues(t, 1<<16-workers*rounds*each, tokens(t, limiter, limit.For(level.name)))
	}
	require.Zero(t, deadlocks(t, b.pool))
}
