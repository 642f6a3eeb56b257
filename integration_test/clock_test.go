package integration_test

import (
	"context"
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
	b := setup(t)
	for _, c := range callers() {
		t.Run(c.name, func(t *testing.T) { // not parallel: waiting counts all
			key := t.Name()
			takeOne(t, b.limiter, steady.For(key).Cost(5e5))
			before := b.row(t, "steady", key)

			holder := b.begin(t, pgx.ReadCommitted)
			takeOne(t, b.limiter.WithTx(holder), steady.For(key))
			var waiters []*asker
			for i, requests := range [][]ratelimit.Request{{steady.For(key)}, {steady.For(key), roomy.For(key), other.For(key)}} {
				process := b.with(t, ratelimit.Config{})
				waiters = append(waiters, startAsking(t, func(ctx context.Context) (bool, error) {
					d, err := c.take(ctx, b.db(), process, requests...)
					return d.Allowed, err
				}))
				eventually(t, "the caller waits for the row", func() bool { return waiting(t, b.pool) == i+1 })
			}
			takeOne(t, b.limiter.WithTx(holder), steady.For(key))
			require.NoError(t, holder.Commit(t.Context()))
			requireAllAllowed(t, waiters...)
			requireExactRefill(t, before, b.row(t, "steady", key), 4)
		})
	}
}

// In a long transaction a decision is made at its own time, not at the time of the BEGIN.
func TestLongTransactionDecidesAtThePresent(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, level := range levels {
		t.Run(level.name, func(t *testing.T) {
			t.Parallel()
			key := t.Name()
			takeOne(t, b.limiter, steady.For(key).Cost(5e5))
			before := b.row(t, "steady", key)
			old := b.begin(t, level.level)
			for range 99 {
				takeOne(t, b.limiter, steady.For(key))
			}
			meanwhile, err := b.limiter.Take(t.Context(), steady.For(key))
			require.NoError(t, err)
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
