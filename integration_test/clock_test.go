package integration_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// steady gains a hundred tokens a second, and is never full or empty while a test runs.
var steady = ratelimit.Define("steady", ratelimit.TokenBucket{Rate: 100, Period: time.Second, Capacity: 1e6})

// requireExactRefill checks that between two readings of a bucket every instant was credited once.
func requireExactRefill(t *testing.T, before, after row, taken float64) {
	t.Helper()
	require.GreaterOrEqual(t, after.TS, before.TS, "ts does not go back")
	arrived := float64(after.TS-before.TS) * 100 / 1e6
	require.InDelta(t, before.Value+arrived-taken, after.Value, 1e-6)
}

// A statement's time is its start. After a wait for the row, that time may be before the row's own.
func TestWaitingForTheRowCreditsNoInstantTwice(t *testing.T) {
	t.Parallel()
	requests := map[string]func(key string) []ratelimit.Request{
		"OneLimit": func(key string) []ratelimit.Request { return []ratelimit.Request{steady.For(key)} },
		"SeveralLimits": func(key string) []ratelimit.Request {
			return []ratelimit.Request{steady.For(key), roomy.For(key), other.For(key)}
		},
	}
	b := setup(t)
	for name, ask := range requests {
		for _, c := range callers() {
			t.Run(name+"/"+c.name, func(t *testing.T) { // not parallel: waiting counts all
				key := t.Name()
				requireAllowed(t, taking(steady.For(key).Cost(5e5)), b.limiter)
				before := b.row(t, "steady", key)

				holder := b.begin(t, pgx.ReadCommitted)
				requireAllowed(t, taking(steady.For(key)), b.limiter.WithTx(holder))
				waited := make(chan error, 1)
				var told ratelimit.Decision
				go func() {
					var err error
					told, err = c.take(t.Context(), b.db(), b.limiter, ask(key)...)
					waited <- err
				}()
				eventually(t, "the caller waits for the row", func() bool { return waiting(t, b.pool) == 1 })
				requireAllowed(t, taking(steady.For(key)), b.limiter.WithTx(holder))
				require.NoError(t, holder.Commit(t.Context()))
				require.NoError(t, <-waited)
				require.True(t, told.Allowed)
				requireExactRefill(t, before, b.row(t, "steady", key), 3)
			})
		}
	}
}

// In a long transaction a decision is made at its own time, not at the time of the BEGIN.
func TestLongTransactionDecidesAtThePresent(t *testing.T) {
	t.Parallel()
	onEach(t, testLongTransactionDecidesAtThePresent, onPostgres, inMemory)
}

func testLongTransactionDecidesAtThePresent(t *testing.T, on backend) {
	b := on.setup(t)
	for _, level := range levels {
		t.Run(level.name, func(t *testing.T) {
			t.Parallel()
			key := t.Name()
			requireAllowed(t, taking(steady.For(key).Cost(5e5)), b.limiter)
			before := b.row(t, "steady", key)
			old := b.begin(t, level.level)
			var meanwhile ratelimit.Decision
			for range 100 {
				var err error
				meanwhile, err = b.limiter.Take(t.Context(), steady.For(key))
				require.NoError(t, err)
			}
			d, err := b.limiter.WithTx(old).Take(t.Context(), steady.For(key))
			require.NoError(t, err)
			require.True(t, d.Allowed)
			require.True(t, d.At.After(meanwhile.At))
			require.NoError(t, old.Commit(t.Context()))
			requireExactRefill(t, before, b.row(t, "steady", key), 101)
		})
	}
}

// clock is a clock that a test sets.
type clock struct{ unixMicro atomic.Int64 }

func (c *clock) set(instant time.Time) { c.unixMicro.Store(instant.UnixMicro()) }
func (c *clock) now() time.Time        { return time.UnixMicro(c.unixMicro.Load()) }

var clockNoon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// clocked is one bucket of ten tokens a minute on a clock that the test sets.
type clocked struct {
	*bundle
	*clock
	limit   ratelimit.Limit
	key     string
	where   int // in places
	several bool
}

// ask takes cost tokens, alone or with other limits that have enough.
func (c clocked) ask(t *testing.T, cost float64) (d ratelimit.Decision) {
	t.Helper()
	requests := []ratelimit.Request{c.limit.For(c.key).Cost(cost)}
	if c.several {
		requests = append(requests, roomy.For(c.key), other.For(c.key))
	}
	require.NoError(t, places(c.bundle)[c.where].run(t.Context(), func(limiter *ratelimit.Limiter) (err error) {
		d, err = limiter.Take(t.Context(), requests...)
		return err
	}))
	return d
}

// onClocks runs a test for both policies, in every place, for one limit and for one of several.
func onClocks(t *testing.T, run func(t *testing.T, c clocked)) {
	t.Helper()
	b := setup(t)
	policies := []ratelimit.Limit{
		ratelimit.Define("bucket", ratelimit.PerMinute(10)),
		ratelimit.Define("window", ratelimit.FixedWindow{Rate: 10, Period: time.Minute, Start: clockNoon}),
	}
	for _, limit := range policies {
		for where, place := range places(b) {
			for _, several := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%s/Several=%v", limit.Name(), place.name, several), func(t *testing.T) {
					t.Parallel()
					set := &clock{}
					own := &bundle{pool: b.pool, schema: b.schema, limiter: b.with(t, ratelimit.Config{AsOf: set.now})}
					run(t, clocked{own, set, limit, t.Name(), where, several})
				})
			}
		}
	}
}

// A small step back, as between two servers' clocks, stops the bucket until the clock has caught up. No token is lost or given
// twice.
func TestClockThatStepsBackGivesNothingTwice(t *testing.T) {
	t.Parallel()
	onClocks(t, func(t *testing.T, c clocked) {
		t.Helper()
		c.set(clockNoon)
		require.True(t, c.ask(t, 9).Allowed)
		was := c.rows(t, c.key)
		for _, back := range []time.Duration{time.Millisecond, 59 * time.Second} {
			c.set(clockNoon.Add(-back))
			require.False(t, c.ask(t, 2).Allowed)
			require.Equal(t, was, c.rows(t, c.key))
		}
		require.True(t, c.ask(t, 1).Allowed, "what was there is there")
		require.False(t, c.ask(t, 1).Allowed)
		c.set(clockNoon)
		require.False(t, c.ask(t, 1).Allowed, "the time that passed twice brings nothing")
		c.set(clockNoon.Add(time.Minute))
		require.True(t, c.ask(t, 10).Allowed, "the minute after it does")
		require.False(t, c.ask(t, 0.01).Allowed)
	})
}

// A clock that was a day ahead left the bucket in a future that it must not wait for.
func TestClockThatWasFarAheadIsForgotten(t *testing.T) {
	t.Parallel()
	onClocks(t, func(t *testing.T, c clocked) {
		t.Helper()
		c.set(clockNoon.Add(ratelimit.Day))
		require.True(t, c.ask(t, 10).Allowed)
		c.set(clockNoon)
		refused := c.ask(t, 1)
		require.False(t, refused.Allowed, "the way back brings nothing")
		require.LessOrEqual(t, refused.RetryAfter, time.Minute)
		mended := c.row(t, c.limit.Name(), c.key)
		require.Equal(t, clockNoon.UnixMicro(), mended.TS, "a refusal mends ts too")
		require.Zero(t, mended.Value)
		c.set(clockNoon.Add(refused.RetryAfter - time.Microsecond))
		require.False(t, c.ask(t, 1).Allowed)
		c.set(clockNoon.Add(refused.RetryAfter))
		require.True(t, c.ask(t, 1).Allowed)
		c.set(clockNoon.Add(time.Hour))
		require.True(t, c.ask(t, 10).Allowed)
		require.False(t, c.ask(t, 1).Allowed, "at most the capacity came")
	})
}

// Reset makes the bucket full at the instant it has, or the time since would come once more.
func TestResetDoesNotMoveABucketBackInTime(t *testing.T) {
	t.Parallel()
	b, c := setup(t), &clock{}
	b.limiter = b.with(t, ratelimit.Config{AsOf: c.now})
	limit := ratelimit.Define("bucket", ratelimit.PerMinute(10))
	c.set(clockNoon)
	requireAllowed(t, taking(limit.For("key").Cost(4)), b.limiter)
	c.set(clockNoon.Add(-30 * time.Second))
	require.NoError(t, b.limiter.Reset(t.Context(), limit.For("key")))
	requireAllowed(t, taking(limit.For("key").Cost(10)), b.limiter)
	c.set(clockNoon)
	v, err := b.limiter.Value(t.Context(), limit.For("key"))
	require.NoError(t, err)
	require.Zero(t, v.Tokens)
}

// A clock may stand anywhere that a row can count from, the zero time included: no statement fails for it and takes
// the caller's transaction with it.
func TestTheFirstInstantIsAnInstantLikeOthers(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for name, limit := range map[string]ratelimit.Limit{
		"Bucket":  ratelimit.Define("bucket", ratelimit.PerMinute(4)),
		"Spread":  ratelimit.Define("spread", ratelimit.FixedWindow{Rate: 4, Period: time.Hour, Capacity: 12}),
		"Sharded": ratelimit.Define("sharded", ratelimit.FixedWindow{Rate: 4, Period: time.Hour, Capacity: 12, Shards: 2}),
		"Start":   ratelimit.Define("start", ratelimit.FixedWindow{Rate: 4, Period: century, Start: clockNoon}),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			now := time.Time{}
			limiter := b.with(t, ratelimit.Config{AsOf: func() time.Time { return now }})
			request := limit.For(t.Name())
			tx := b.begin(t, pgx.ReadCommitted)
			bound := limiter.WithTx(tx)
			takeAll(t, bound, request)
			d, err := bound.Take(t.Context(), request)
			require.NoError(t, err)
			require.False(t, d.Allowed)
			now = now.Add(d.RetryAfter - time.Microsecond)
			requireRefused(t, bound, []ratelimit.Request{request})
			now = now.Add(time.Microsecond)
			requireAllowed(t, taking(request), bound)
			r, err := bound.Reserve(t.Context(), request.Cost(4))
			require.NoError(t, err)
			require.NoError(t, bound.Settle(t.Context(), r.ID, request.Cost(5)))
			require.NoError(t, bound.Charge(t.Context(), request))
			require.NoError(t, bound.Reset(t.Context(), request))
			require.NoError(t, tx.Commit(t.Context()))
			require.InDelta(t, limit.Capacity(), tokens(t, limiter, request), 0)
		})
	}
}
