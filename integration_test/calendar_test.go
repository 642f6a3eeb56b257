package integration_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// monthly is a limit of a thousand a month, by months in Berlin.
var monthly = ratelimit.CalendarWindow{Rate: 1000, Resets: ratelimit.Monthly, Zone: "Europe/Berlin"}

// firstOf returns the beginning of a month of the year 2026 by the clocks of a zone.
func firstOf(t *testing.T, zone string, month time.Month) time.Time {
	t.Helper()
	location, err := time.LoadLocation(zone)
	require.NoError(t, err)
	return time.Date(2026, month, 1, 0, 0, 0, 0, location)
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

// The clock of the database goes on, or back, by many windows.
func TestTheClockGoesManyWindowsOn(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, resets := range []ratelimit.Calendar{ratelimit.Daily, ratelimit.Weekly, ratelimit.Monthly, ratelimit.Quarterly, ratelimit.Yearly} {
		limit := ratelimit.Define("limit", ratelimit.CalendarWindow{Rate: 10, Resets: resets, Zone: "America/Santiago"})
		for _, years := range []int{2, 30, 300, -8, -40} {
			t.Run(string(resets)+time.Date(2000+years, 1, 1, 0, 0, 0, 0, time.UTC).Format("/2006"), func(t *testing.T) {
				t.Parallel()
				representative(t, fmt.Sprint(resets, years), "day300", "month2", "year-8")
				d := b.desk(t, ratelimit.Config{})
				d.clock.set(clockNoon)
				takeAll(t, d.limiter, limit.For(t.Name()))
				d.clock.set(clockNoon.AddDate(years, 0, 0))
				next, err := d.limiter.Take(t.Context(), limit.For(t.Name()))
				require.NoError(t, err)
				require.Equal(t, years > 0, next.Allowed, "a clock that goes back gives nothing")
				begin := d.clock.now().Add(next.ResetAfter)
				fresh, err := b.with(t, ratelimit.Config{AsOf: d.clock.now}).Take(t.Context(), limit.For(t.Name()+" anew"))
				require.NoError(t, err)
				require.Equal(t, begin, d.clock.now().Add(fresh.ResetAfter), "a Limiter that never saw another time says the same")
				local := begin.In(firstOf(t, "America/Santiago", 1).Location())
				require.LessOrEqual(t, local.Hour(), 1)
			})
			t.Run("InTheMidst/"+string(resets)+time.Date(2000+years, 1, 1, 0, 0, 0, 0, time.UTC).Format("/2006"), func(t *testing.T) {
				t.Parallel()
				representative(t, fmt.Sprint(resets, years), "month2", "year-8")
				for reads := range int64(6) {
					n := int64(0)
					l := b.with(t, ratelimit.Config{NoBatching: true, AsOf: func() time.Time {
						if n++; n <= reads+4 {
							return clockNoon
						}
						return clockNoon.AddDate(years, 0, 0)
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
