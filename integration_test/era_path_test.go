package integration_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// rowCounts are numbers of rows of a bucket whose limit changes.
func rowCounts() map[string]int {
	return map[string]int{"OneRow": 1, "FourRows": 4, "EightRows": 8}
}

// A transaction that holds a row while its limit changes has taken by the policy before. A call that waited for the row decides by
// the policy after.
func TestARowIsHeldWhileItsLimitChanges(t *testing.T) {
	t.Parallel()
	for name, shards := range rowCounts() {
		for _, level := range levels {
			t.Run(name+level.name, func(t *testing.T) {
				t.Parallel()
				representative(t, name, "FourRows")
				d := setup(t).changing(t, ratelimit.Config{}, map[string]eraChange{
					"limit": {before: slowly(80, shards), after: slowly(40, shards)},
				})
				request := changingLimit("limit").For("key")
				for shard := range shards {
					d.plant(t, "key", shard, 40/float64(shards), d.clock.now())
				}
				tx := d.begin(t, level.level)
				requireAllowed(t, taking(request.Cost(30)), d.limiter.WithTx(tx)) // more than a row has: all are locked
				d.at(time.Second)
				waited := make(chan ratelimit.Decision, 1)
				go func() {
					decision, err := d.limiter.Take(context.WithoutCancel(t.Context()), request.Cost(15))
					if err == nil {
						waited <- decision
					}
					close(waited)
				}()
				eventually(t, "the caller waits for a row", func() bool { return waiting(t, d.pool) == 1 })
				require.NoError(t, tx.Commit(t.Context()))
				decision, answered := <-waited
				require.True(t, answered)
				require.False(t, decision.Allowed)
				require.Equal(t, 40.0, decision.States[0].Limit.Capacity())
				require.InDelta(t, 10, decision.Remaining, 1e-3)
				require.Equal(t, 10, admitted(t, d.limiter, request, 4, 10))
			})
		}
	}
}

// A transaction that began before the change decides by the policy of the instant of its call.
func TestATransactionThatBeganBeforeTheChangeTakesAfterIt(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for name, shards := range rowCounts() {
		for _, level := range levels {
			for _, settled := range []bool{false, true} {
				t.Run(fmt.Sprint(name, level.name, settled), func(t *testing.T) {
					representative(t, name, "OneRow", "FourRows")
					if level.level != pgx.Serializable { // whose reads in one table may fail one another
						t.Parallel()
					}
					d := b.changing(t, ratelimit.Config{}, map[string]eraChange{
						"limit": {before: slowly(80, shards), after: slowly(40, shards), onChange: ratelimit.ScaleTokens},
					})
					request := changingLimit("limit").For(t.Name())
					for shard := range shards {
						d.plant(t, t.Name(), shard, 40/float64(shards), d.clock.now())
					}
					tx := d.begin(t, level.level)
					require.NoError(t, tx.QueryRow(t.Context(), `SELECT`).Scan()) // it has its snapshot
					d.at(time.Second)
					held := 20.0
					if settled {
						requireAllowed(t, taking(request.Cost(8)), d.limiter)
						held -= 8
					}
					decision, err := d.limiter.WithTx(tx).Take(t.Context(), request.Cost(12))
					if settled && level.level != pgx.ReadCommitted {
						require.True(t, ratelimit.IsRetryable(err), "%v", err)
						return
					}
					require.NoError(t, err)
					require.True(t, decision.Allowed)
					require.NoError(t, tx.Commit(t.Context()))
					d.requireAbout(t, held-12, request)
				})
			}
		}
	}
}

// requireAbout is requireTokens with a tolerance for the tokens that arrive in a few seconds.
func (d *desk) requireAbout(t *testing.T, want float64, request ratelimit.Request) {
	t.Helper()
	require.InDelta(t, want, tokens(t, d.limiter, request), 1e-3)
}

// What a transaction has settled is not settled when it is rolled back, and is not remembered to be.
func TestWhatIsSettledInATransactionIsUndoneWithIt(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for name, shards := range rowCounts() {
		for _, level := range levels {
			t.Run(name+level.name, func(t *testing.T) {
				t.Parallel()
				d := b.changing(t, ratelimit.Config{}, map[string]eraChange{
					"limit": {before: slowly(80, shards), after: faster(80, shards)},
				})
				request := changingLimit("limit").For(t.Name())
				for shard := range shards {
					d.plant(t, t.Name(), shard, 24/float64(shards), d.clock.now())
				}
				d.at(time.Second)
				before := d.rows(t, t.Name())
				undone(t, d.bundle, level.level, func(ctx context.Context, tx *ratelimit.Limiter) {
					for range 3 {
						requireAllowed(t, taking(request), tx)
					}
					require.NoError(t, tx.Charge(ctx, request.Cost(5)))
					require.NoError(t, tx.Credit(ctx, request.Cost(2)))
				})
				require.Equal(t, before, d.rows(t, t.Name()))
				require.Equal(t, 24, admitted(t, d.limiter, request, 4, 20))
			})
		}
	}
}

// Concurrent callers get exactly the tokens that the bucket held, also if its number of rows has changed.
func TestCallersAtOnceGetWhatTheBucketHeld(t *testing.T) {
	t.Parallel()
	onEach(t, testCallersAtOnceGetWhatTheBucketHeld, onPostgres, inMemory, inPartitions)
}

func testCallersAtOnceGetWhatTheBucketHeld(t *testing.T, on backend) {
	for name, shards := range rowCounts() {
		for how, config := range map[string]ratelimit.Config{"Batches": {}, "NoBatching": {NoBatching: true}, "RefusalCache": {RefusalCache: refusalEntries}} {
			t.Run(name+how, func(t *testing.T) {
				t.Parallel()
				representative(t, name, "OneRow", "FourRows")
				d := on.setup(t).changing(t, config, map[string]eraChange{
					"limit": {before: slowly(80, shards), after: faster(80, shards)},
				})
				request := changingLimit("limit").For("key")
				for shard := range shards {
					if shard%2 == 0 {
						d.plant(t, "key", shard, 3, d.clock.now())
					}
				}
				held := tokens(t, d.limiter, request)
				d.at(0)
				require.Equal(t, int(held), admitted(t, d.limiter, request, 6, 25))
				d.at(time.Second)
				require.Zero(t, admitted(t, d.limiter, request, 2, 2))
			})
		}
	}
}

// A refusal that is remembered does not outlive the policy that it was by.
func TestARememberedRefusalEndsWithItsPolicy(t *testing.T) {
	t.Parallel()
	for name, shards := range rowCounts() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := setup(t).changing(t, ratelimit.Config{RefusalCache: refusalEntries}, map[string]eraChange{
				"limit": {before: slowly(80, shards), after: slowly(800, shards), onChange: ratelimit.AddTokens},
			})
			request := changingLimit("limit").For("key")
			for shard := range shards {
				d.plant(t, "key", shard, 0, d.clock.now())
			}
			several := []ratelimit.Request{roomy.For("key"), request}
			for range 3 {
				requireRefused(t, d.limiter, []ratelimit.Request{request})
				requireRefused(t, d.limiter, several)
			}
			d.at(-time.Microsecond)
			requireRefused(t, d.limiter, []ratelimit.Request{request})
			d.at(0)
			requireAllowed(t, taking(request.Cost(100)), d.limiter)
			requireAllowed(t, taking(several...), d.limiter)
			d.requireAbout(t, 619, request)
		})
	}
}

// Before a change, answers about a bucket are by the policy before, also for the time after it. From the change on they are by the
// policy after, also for a row without a call since.
func TestWhatIsSaidOfABucketIsByThePolicyThatHolds(t *testing.T) {
	t.Parallel()
	minutely := func(rate float64, shards int) ratelimit.TokenBucket {
		return ratelimit.TokenBucket{Rate: rate, Period: time.Minute, Shards: shards}
	}
	for name, shards := range rowCounts() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := setup(t).changing(t, ratelimit.Config{}, map[string]eraChange{
				"limit": {before: minutely(60, shards), after: minutely(120, shards), onChange: ratelimit.ScaleTokens},
			})
			request := changingLimit("limit").For("key")
			for shard := range shards {
				d.plant(t, "key", shard, 9/float64(shards), d.clock.now().Add(-time.Second))
			}
			says := func(capacity, held float64, retry, reset time.Duration) {
				t.Helper()
				check, err := d.limiter.Check(t.Context(), request.Cost(50))
				require.NoError(t, err)
				value, err := d.limiter.Value(t.Context(), request)
				require.NoError(t, err)
				wait, err := value.RetryAfter(d.clock.now(), 50)
				require.NoError(t, err)
				require.False(t, check.Allowed)
				require.Equal(t, capacity, value.Limit.Capacity())
				require.Equal(t, capacity, check.States[0].Limit.Capacity())
				require.InDelta(t, held, value.Tokens, 1e-9)
				require.InDelta(t, held, check.Remaining, 1e-9)
				for want, got := range map[*time.Duration]time.Duration{&retry: check.RetryAfter, &reset: check.ResetAfter} {
					require.InDelta(t, want.Microseconds(), got.Microseconds(), 1)
				}
				require.Equal(t, check.RetryAfter, wait)
				require.InDelta(t, held+capacity/60, value.At(d.clock.now().Add(time.Second)), 1e-9)
				require.Equal(t, capacity, value.At(d.clock.now().Add(time.Hour)))
				require.InDelta(t, capacity, d.limiter.Resolve(request).Capacity(), 0)
			}
			says(60, 10, 40*time.Second, 50*time.Second)
			before := d.rows(t, "key")
			d.at(0)
			says(120, 22, 14*time.Second, 49*time.Second)
			d.at(time.Second)
			says(120, 24, 13*time.Second, 48*time.Second)
			require.Equal(t, before, d.rows(t, "key"), "looks write nothing")
			requireRefused(t, d.limiter, []ratelimit.Request{request.Cost(50)})
			says(120, 24, 13*time.Second, 48*time.Second)
			d.at(14 * time.Second)
			requireAllowed(t, taking(request.Cost(50)), d.limiter)
		})
	}
}
