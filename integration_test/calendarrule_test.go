package integration_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// A rule changes a calendar window in its midst, and to another kind and back. What arrives is counted by the policy of its
// time.
func TestARuleChangesACalendarWindow(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limit := ratelimit.Define("limit", ratelimit.PerHour(7))
	change := in(t, "Europe/Berlin", time.March, 16, 12)
	april := in(t, "Europe/Berlin", time.April, 1, 0)
	day := ratelimit.CalendarWindow{Rate: 40, Resets: ratelimit.Daily, Zone: "Europe/Berlin"}
	bucket := ratelimit.TokenBucket{Rate: 100, Period: century}
	for _, c := range []struct {
		name          string
		before, after ratelimit.Policy
		onChange      ratelimit.OnChange
		atChange      float64 // of 100, with 30 taken in March
		inApril       float64
	}{
		{"MoreAMonth", ratelimit.CalendarWindow{Rate: 100, Resets: ratelimit.Monthly, Zone: "Europe/Berlin"}, monthly, ratelimit.KeepTokens, 70, 1000},
		{"MoreAMonthAdded", ratelimit.CalendarWindow{Rate: 100, Resets: ratelimit.Monthly, Zone: "Europe/Berlin"}, monthly, ratelimit.AddTokens, 970, 1000},
		{"MoreAMonthScaled", ratelimit.CalendarWindow{Rate: 100, Resets: ratelimit.Monthly, Zone: "Europe/Berlin"}, monthly, ratelimit.ScaleTokens, 700, 1000},
		{"MoreAMonthReset", ratelimit.CalendarWindow{Rate: 100, Resets: ratelimit.Monthly, Zone: "Europe/Berlin"}, monthly, ratelimit.ResetTokens, 1000, 1000},
		{"MonthToDay", ratelimit.CalendarWindow{Rate: 100, Resets: ratelimit.Monthly, Zone: "Europe/Berlin"}, day, ratelimit.KeepTokens, 40, 40},
		{"BucketToMonth", bucket, monthly, ratelimit.KeepTokens, 70, 1000},
		{"MonthToBucket", ratelimit.CalendarWindow{Rate: 100, Resets: ratelimit.Monthly, Zone: "Europe/Berlin"}, bucket, ratelimit.KeepTokens, 70, 70},
		{"ShardsToMonth", ratelimit.TokenBucket{Rate: 100, Period: century, Shards: 4}, monthly, ratelimit.ResetTokens, 1000, 1000},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Name: "changing", Eras: []ratelimit.Era{
				{Policy: c.before, Name: "before"}, {From: change, Policy: c.after, OnChange: c.onChange, Name: "after"},
			}})
			require.NoError(t, err)
			d := b.desk(t, ratelimit.Config{Policies: eraRules{"limit": rule}})
			request := limit.For(c.name)
			d.clock.set(change.Add(-time.Hour))
			first, err := d.limiter.Take(t.Context(), request.Cost(30))
			require.NoError(t, err)
			require.True(t, first.Allowed)
			require.Equal(t, "before", first.States[0].Rule)
			d.clock.set(change)
			value, err := d.limiter.Value(t.Context(), request)
			require.NoError(t, err)
			require.InDelta(t, c.atChange, value.Tokens, 1e-2)
			took, err := d.limiter.Take(t.Context(), request)
			require.NoError(t, err)
			require.Equal(t, "after", took.States[0].Rule)
			d.clock.set(april)
			value, err = d.limiter.Value(t.Context(), request)
			require.NoError(t, err)
			if c.after == ratelimit.Policy(bucket) {
				require.InDelta(t, c.inApril-1, value.Tokens, 1e-1)
			} else {
				require.InDelta(t, c.inApril, value.Tokens, 0)
			}
		})
	}
}

// Prune deletes a full bucket, and keeps a bucket that is not full.
func TestPruneOfCalendarWindows(t *testing.T) {
	t.Parallel()
	onEach(t, testPruneOfCalendarWindows, onPostgres, inMemory, inPartitions)
}

func testPruneOfCalendarWindows(t *testing.T, on backend) {
	b := on.setup(t)
	d := b.desk(t, ratelimit.Config{})
	limit := ratelimit.Define("month", monthly)
	begins := in(t, "Europe/Berlin", time.March, 1, 0)
	d.clock.set(begins)
	requireAllowed(t, taking(limit.For("used").Cost(10)), d.limiter)
	require.NoError(t, d.limiter.Charge(t.Context(), limit.For("owing").Cost(3000)))
	prune := func(at time.Time) int64 {
		d.clock.set(at)
		deleted, err := d.limiter.Prune(t.Context(), limit)
		require.NoError(t, err)
		return deleted
	}
	require.Zero(t, prune(begins.AddDate(0, 1, 0).Add(-time.Microsecond)))
	require.EqualValues(t, 1, prune(begins.AddDate(0, 2, 10)), "the used one")
	require.Zero(t, prune(begins.AddDate(0, 2, 20)), "a third window has not begun")
	require.EqualValues(t, 1, prune(begins.AddDate(0, 5, 0)))
}

// A refusal from memory ends with the window.
func TestARefusalCacheOverTheEndOfACalendarWindow(t *testing.T) {
	t.Parallel()
	b := setup(t)
	d := b.desk(t, ratelimit.Config{RefusalCache: 64})
	limit := ratelimit.Define("month", monthly)
	ends := in(t, "Europe/Berlin", time.April, 1, 0)
	d.clock.set(ends.Add(-time.Microsecond))
	takeAll(t, d.limiter, limit.For("key"))
	for range 3 {
		refused, err := d.limiter.Take(t.Context(), limit.For("key"))
		require.NoError(t, err)
		require.False(t, refused.Allowed)
		require.Equal(t, time.Microsecond, refused.RetryAfter)
		require.Equal(t, time.Microsecond, refused.ResetAfter)
	}
	d.clock.set(ends)
	requireAllowed(t, taking(limit.For("key")), d.limiter)
	d.requireTokens(t, 999, limit.For("key"))
}
