package integration_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/atonce"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func TestShardedDecisionsTakeNoSIREADLock(t *testing.T) {
	t.Parallel()
	limit, owing := spread(8, 64), ratelimit.Define("owing", ratelimit.TokenBucket{Rate: 1, Period: century, MaxReserved: 1, Shards: 8})
	for _, mode := range planModes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			b := setup(t, planning(mode))
			limiter, _ := b.stopped(t)
			require.NoError(t, limiter.Reset(t.Context(), limit.For("full")))
			drain(t, limiter, limit.For("low"), 0.5)
			owe(t, limiter, owing.For("key"))
			kept, err := limiter.Reserve(t.Context(), limit.For("full").Cost(10), other.For("key"))
			require.NoError(t, err)
			b.exec(t, "ANALYZE ratelimit.buckets, ratelimit.reservations")
			for _, c := range []struct {
				name    string
				allowed bool
				call    verb
			}{
				{"TakeFromOneRow", true, taking(limit.For("full"))},
				{"TakeFromOneRowOfANewKey", true, taking(limit.For("new"))},
				{"TakeFromAllRows", true, taking(limit.For("full").Cost(30))},
				{"TakeFromAllRowsOfANewKey", true, taking(limit.For("new").Cost(30))},
				{"TakeRefused", false, taking(limit.For("low"))},
				{"TakeSeveral", true, taking(limit.For("full"), limit.For("new"), other.For("key"))},
				{"TakeSeveralRefused", false, taking(limit.For("full"), limit.For("low"), other.For("key"))},
				{"ReserveWhatIsThere", true, reserving(limit.For("full"))},
				{"ReserveWhatIsNot", true, reserving(limit.For("low"), other.For("key"))},
				{"ReserveRefused", false, reserving(owing.For("key"))},
				{"Reset", true, resetting(limit.For("low"), other.For("key"))},
				{"Charge", true, func(ctx context.Context, l *ratelimit.Limiter) (bool, error) {
					return true, l.Charge(ctx, limit.For("low"), other.For("key"))
				}},
				{"Credit", true, func(ctx context.Context, l *ratelimit.Limiter) (bool, error) {
					return true, l.Credit(ctx, limit.For("low"), other.For("key"))
				}},
				{"Settle", true, func(ctx context.Context, l *ratelimit.Limiter) (bool, error) {
					return true, l.Settle(ctx, kept.ID, limit.For("full").Cost(4))
				}},
				{"Cancel", true, func(ctx context.Context, l *ratelimit.Limiter) (bool, error) { return true, l.Cancel(ctx, kept.ID) }},
			} {
				t.Run(c.name, func(t *testing.T) { // not parallel: they share the session
					b.requireNoSIREADs(t, func(tx pgx.Tx) error {
						allowed, err := c.call(t.Context(), limiter.WithTx(tx))
						require.True(t, err != nil || allowed == c.allowed)
						return err
					})
				})
			}
		})
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

// Of calls that are answered in one batch none may leave that to another.
func TestCallsAtOnceMendAWrongClockOnOneShard(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limiter, now := b.stopped(t)
	request := spread(8, 64).For("key")
	requireAllowed(t, taking(request.Cost(64)), limiter)
	b.exec(t, `UPDATE ratelimit.buckets SET ts = ts + $1 WHERE shard = 5`, ratelimit.Day.Microseconds())
	now.set(clockNoon.Add(time.Second))
	require.NoError(t, atonce.Do(32, func(int) error {
		d, err := limiter.Take(t.Context(), request.Cost(20))
		if err == nil && d.Allowed {
			err = fmt.Errorf("allowed with %v left", d.Remaining)
		}
		return err
	}))
	for _, r := range b.rows(t, "key") {
		require.LessOrEqual(t, r.TS, now.now().UnixMicro())
	}
}
