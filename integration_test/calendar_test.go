package integration_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

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
