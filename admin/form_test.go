package admin

import (
	"net/url"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// TestFormHoldsEveryKind promises that the form of a rule holds all fields of its policy.
func TestFormHoldsEveryKind(t *testing.T) {
	t.Parallel()
	for _, policy := range []ratelimit.Policy{
		ratelimit.SlidingWindow{Rate: 50, Period: time.Hour, Slices: 12},
		ratelimit.CalendarWindow{Rate: 50, Resets: ratelimit.Yearly, Zone: "Europe/Berlin", FirstMonth: time.April, FirstDay: 6},
		ratelimit.CalendarWindow{Rate: 5, Resets: ratelimit.Weekly, Zone: "UTC", FirstWeekday: time.Saturday, MaxReserved: 1},
		ratelimit.FixedWindow{
			Rate: 5, Period: time.Hour, MaxReserved: ratelimit.None, Start: time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC),
		},
		ratelimit.TokenBucket{Rate: 5, Period: time.Hour, Capacity: 64, Shards: 8},
		ratelimit.Concurrency{Slots: 50, Lease: time.Hour},
	} {
		filled := form{}
		filled.fill(rules.Rule{Policy: policy})
		again, err := filled.policy()
		require.NoError(t, err)
		require.Equal(t, policy.String(), again.String())
	}
}

// FuzzForm parses a filled-in form. The result is an error of the form, or a rule that survives a round trip through a
// form.
func FuzzForm(f *testing.F) {
	for _, query := range []string{
		"", "kind=token+bucket&rate=10&period=1m&capacity=1,000.5&shards=4", "kind=concurrency&slots=5&lease=90s",
		"kind=calendar+window&rate=1e3&resets=week&first_weekday=monday&zone=Europe/Berlin", "rate=1,5&period=1e300",
		"kind=fixed+window&rate=1&period=1us&start=2026-01-01T00:00:00Z", "kind=calendar+window&rate=1&zone=%22", "kind=leaky",
		"rate=1&period=3.3333333333w", "%zz", "rate=NaN", "rate=Inf&period=1s", "rate=1e999",
	} {
		f.Add(query)
	}
	f.Fuzz(func(t *testing.T, query string) {
		values, _ := url.ParseQuery(query)
		policy, err := form(values).policy()
		if err != nil {
			require.ErrorIs(t, err, errForm)
			return
		}
		written := form{}
		written.fill(rules.Rule{Policy: policy})
		again, err := written.policy()
		require.NoError(t, err, "%v", written)
		require.Equal(t, policy.String(), again.String(), "%v", written)
	})
}
