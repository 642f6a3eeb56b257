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
			after := b.row(t, "steady", key)
			require.GreaterOrEqual(t, after.TS, before.TS, "ts does not go back")
			arrived := float64(after.TS-before.TS) * 100 / 1e6
			require.InDelta(t, before.Value+arrived-101, after.Value, 1e-6, "every instant is credited once")
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

// A decision on a calendar is one round trip, also the first one, and takes no SIREAD lock.
func TestWhatADecisionOnACalendarTakes(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "it counts round trips")
	b, w := setupCounted(t)
	limit := func() ratelimit.Limit {
		return ratelimit.Define("month", ratelimit.CalendarWindow{Rate: 1000, Resets: ratelimit.Monthly, Zone: "Europe/Berlin"})
	}
	requireAllowed(t, taking(roomy.For("first")), b.limiter)
	for range 2 {
		require.Equal(t, 1, w.count(func() { requireAllowed(t, taking(limit().For("key")), b.limiter) }))
	}
	tx := b.begin(t, pgx.Serializable)
	bound := b.limiter.WithTx(tx)
	requireAllowed(t, taking(limit().For("key")), bound) // the statement is prepared
	require.Equal(t, 1, w.count(func() { requireAllowed(t, taking(limit().For("key")), bound) }))
	other := ratelimit.Define("other", ratelimit.CalendarWindow{Rate: 9, Resets: ratelimit.Yearly, Zone: "Asia/Tokyo"})
	requireAllowed(t, taking(limit().For("key"), other.For("key")), bound)
	require.Zero(t, sireads(t, tx))
	require.NoError(t, tx.Commit(t.Context()))
}

// In the midst of a call the clock of the database goes on, or back, by many windows. The answer is of a window near that instant.
func TestTheClockGoesManyWindowsOn(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, resets := range []ratelimit.Calendar{ratelimit.Daily, ratelimit.Monthly, ratelimit.Yearly} {
		limit := ratelimit.Define("limit", ratelimit.CalendarWindow{Rate: 10, Resets: resets, Zone: "America/Santiago"})
		for _, years := range []int{2, 300, -8} {
			t.Run(fmt.Sprint(resets, years), func(t *testing.T) {
				t.Parallel()
				representative(t, fmt.Sprint(resets, years), "day300", "month2", "year-8")
				for reads := range 6 {
					n, now := 0, clockNoon.AddDate(years, 0, 0)
					l := b.with(t, ratelimit.Config{NoBatching: true, AsOf: func() time.Time {
						if n++; n <= reads+4 {
							return clockNoon
						}
						return now
					}})
					tx := b.begin(t, pgx.Serializable)
					for range 3 {
						d, err := l.WithTx(tx).Take(t.Context(), limit.For(t.Name()), roomy.For(t.Name()))
						require.NoError(t, err)
						require.Less(t, d.States[0].ResetAfter, 400*ratelimit.Day)
					}
					require.NoError(t, tx.Rollback(t.Context()))
				}
			})
		}
	}
}
