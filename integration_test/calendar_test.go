package integration_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// monthly is a thousand a month in Berlin.
var monthly = ratelimit.CalendarWindow{Rate: 1000, Resets: ratelimit.Monthly, Zone: "Europe/Berlin"}

// in returns an instant of the year 2026 by the clocks of a zone.
func in(t *testing.T, zone string, month time.Month, day, hour int) time.Time {
	t.Helper()
	location, err := time.LoadLocation(zone)
	require.NoError(t, err)
	return time.Date(2026, month, day, hour, 0, 0, 0, location)
}

// A thousand a month are available again on the first at midnight in Berlin, also if daylight saving time begins or ends in
// between.
func TestAThousandAMonthInBerlin(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limit := ratelimit.Define("month", monthly)
	for _, month := range []struct {
		begins, ends time.Time
		hours        int // from one to the other
	}{
		{in(t, "Europe/Berlin", time.March, 1, 0), in(t, "Europe/Berlin", time.April, 1, 0), 31*24 - 1},
		{in(t, "Europe/Berlin", time.October, 1, 0), in(t, "Europe/Berlin", time.November, 1, 0), 31*24 + 1},
		{in(t, "Europe/Berlin", time.February, 1, 0), in(t, "Europe/Berlin", time.March, 1, 0), 28 * 24},
	} {
		t.Run(month.begins.Format("2006-01"), func(t *testing.T) {
			t.Parallel()
			require.Equal(t, time.Duration(month.hours)*time.Hour, month.ends.Sub(month.begins))
			d := b.desk(t, ratelimit.Config{})
			request := limit.For(t.Name())
			take := func(cost float64) ratelimit.Decision {
				decision, err := d.limiter.Take(t.Context(), request.Cost(cost))
				require.NoError(t, err)
				return decision
			}
			d.clock.set(month.begins.Add(-time.Microsecond))
			require.True(t, take(1000).Allowed, "of the month before")
			require.False(t, take(1).Allowed)
			d.clock.set(month.begins)
			decision := take(400)
			require.True(t, decision.Allowed)
			require.InDelta(t, 600, decision.Remaining, 0, "nothing of the month before is left")
			require.Equal(t, month.ends.Sub(month.begins), decision.ResetAfter)
			d.clock.set(month.begins.AddDate(0, 0, 20).Add(13 * time.Minute))
			require.True(t, take(600).Allowed)
			refused := take(1)
			require.False(t, refused.Allowed)
			require.Equal(t, month.ends.Sub(d.clock.now()), refused.RetryAfter)
			d.clock.set(month.ends.Add(-time.Microsecond))
			require.Equal(t, time.Microsecond, take(1).RetryAfter)
			d.clock.set(month.ends)
			require.InDelta(t, 999, take(1).Remaining, 0)
		})
	}
}

// A caller's transaction at each isolation level, and a call by itself, may be the first to use a calendar.
func TestTheFirstUseOfACalendar(t *testing.T) {
	t.Parallel()
	for _, c := range callers() {
		for _, several := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/Several=%v", c.name, several), func(t *testing.T) {
				t.Parallel()
				b := setup(t)
				limit := ratelimit.Define("month", monthly)
				requests := []ratelimit.Request{limit.For("key").Cost(2)}
				if several {
					requests = append(requests, roomy.For("key"), ratelimit.Define("day", ratelimit.CalendarWindow{Rate: 10, Resets: ratelimit.Daily, Zone: "Asia/Beirut"}).For("key"))
				}
				d, err := c.take(t.Context(), b.db(), b.limiter, requests...)
				require.NoError(t, err)
				require.True(t, d.Allowed)
				require.InDelta(t, 998, d.States[0].Remaining, 0)
				end := d.At.Add(d.States[0].ResetAfter).In(in(t, "Europe/Berlin", 1, 1, 0).Location())
				require.Equal(t, "01 00:00:00.000000", end.Format("02 15:04:05.000000"))
				require.InDelta(t, 998, b.held(t, "month", "key"), 0)
			})
		}
	}
}

// A decision is one round trip, also the first on a calendar, and takes no SIREAD lock.
func TestWhatADecisionOnACalendarTakes(t *testing.T) {
	t.Parallel()
	fastPathOnly(t, "it counts round trips")
	b, w := setupCounted(t)
	limit := ratelimit.Define("month", monthly)
	requireAllowed(t, taking(roomy.For("first")), b.limiter)
	require.Equal(t, 1, w.count(func() { requireAllowed(t, taking(limit.For("key")), b.limiter) }))
	require.Equal(t, 1, w.count(func() { requireAllowed(t, taking(limit.For("key")), b.limiter) }))
	inline := func() ratelimit.Limit { return ratelimit.Define("month", monthly) }
	require.Equal(t, 1, w.count(func() { requireAllowed(t, taking(inline().For("key")), b.limiter) }))
	tx := b.begin(t, pgx.Serializable)
	bound := b.limiter.WithTx(tx)
	requireAllowed(t, taking(limit.For("key")), bound) // the statement is prepared
	require.Equal(t, 1, w.count(func() { requireAllowed(t, taking(limit.For("key")), bound) }))
	other := ratelimit.Define("other", ratelimit.CalendarWindow{Rate: 9, Resets: ratelimit.Yearly, Zone: "Asia/Tokyo"})
	requireAllowed(t, taking(limit.For("key"), other.For("key")), bound)
	require.Zero(t, sireads(t, tx))
	var locks int
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks WHERE mode = 'SIReadLock' AND pid = pg_backend_pid()
		AND relation NOT IN (SELECT oid FROM pg_class WHERE relname LIKE 'pg\_%')`).Scan(&locks))
	require.Zero(t, locks)
	require.NoError(t, tx.Commit(t.Context()))
}
