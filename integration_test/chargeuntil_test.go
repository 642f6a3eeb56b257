package integration_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// A bucket that is charged until an instant gives nothing before it, and gives again at the end that the call returns:
// the instant itself for a token bucket, and the start of a window for windows. A second charge until an earlier
// instant, or the same one, changes nothing.
func TestChargeUntil(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, on backend) {
		t.Helper()
		d := on.setup(t).desk(t, ratelimit.Config{})
		for name, c := range map[string]struct {
			policy ratelimit.Policy
			end    time.Duration // for an instant of 90 min and 123 ns

			rounding time.Duration
		}{
			"bucket":   {ratelimit.TokenBucket{Rate: 7, Period: time.Second, Capacity: 3}, 90*time.Minute + time.Microsecond, time.Microsecond},
			"slow":     {ratelimit.TokenBucket{Rate: 1, Period: 13 * time.Hour, Capacity: 1000}, 90*time.Minute + time.Microsecond, time.Microsecond},
			"fast":     {ratelimit.TokenBucket{Rate: 1e6, Period: time.Second}, 90*time.Minute + time.Microsecond, time.Microsecond},
			"sharded":  {ratelimit.TokenBucket{Rate: 16, Period: time.Second, Shards: 4}, 90*time.Minute + time.Microsecond, time.Microsecond},
			"fixed":    {ratelimit.FixedWindow{Rate: 10, Period: time.Hour, Start: clockNoon}, 2 * time.Hour, 0},
			"calendar": {ratelimit.CalendarWindow{Rate: 10, Resets: ratelimit.Daily}, 12 * time.Hour, 0},
		} {
			request, instant := ratelimit.Define(name, c.policy).For("ada"), clockNoon.Add(90*time.Minute+123)
			d.at(0)
			for _, until := range []time.Time{instant, instant, clockNoon.Add(time.Hour), clockNoon.Add(-time.Hour)} {
				end, err := d.limiter.ChargeUntil(t.Context(), until, request)
				require.NoError(t, err, name)
				require.Contains(t, []time.Duration{0, c.rounding}, end.Sub(clockNoon)-c.end, name)
				c.end, c.rounding = end.Sub(clockNoon), 0
			}
			for _, at := range []time.Duration{c.end - time.Microsecond, c.end} {
				d.at(at)
				decision, err := d.limiter.Check(t.Context(), request.Cost(0))
				require.NoError(t, err)
				require.Equal(t, at == c.end, decision.Allowed, "%s after %v", name, at)
				require.Equal(t, c.end-at, decision.RetryAfter, name)
			}
		}
		_, err := d.limiter.ChargeUntil(t.Context(), clockNoon, ratelimit.Define("sliding", ratelimit.SlidingWindow{Rate: 1, Period: time.Hour}).For("ada"))
		require.ErrorIs(t, err, ratelimit.ErrInvalidRequest)
		_, err = d.limiter.ChargeUntil(t.Context(), clockNoon.AddDate(1000, 0, 0), ratelimit.Define("far", ratelimit.PerSecond(1000)).For("ada"))
		require.ErrorIs(t, err, ratelimit.ErrInvalidRequest)
		require.ErrorContains(t, err, "would owe more than 1e+12 tokens")
	}, onPostgres, inMemory, byRoutedStatements)
}
