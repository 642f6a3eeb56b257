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
		ratelimit.Concurrency{Most: 50, Lease: time.Hour},
	} {
		filled := form{}
		filled.fill(rules.Rule{Policy: policy})
		again, err := filled.policy()
		require.NoError(t, err)
		require.Equal(t, policy.String(), again.String())
	}
}

// FuzzForm parses a filled-in form. The result is an error of the form, or a rule that survives a round trip through a form.
func FuzzForm(f *testing.F) {
	for _, query := range []string{
		"", "kind=token+bucket&rate=10&period=1m&capacity=1,000.5&more=shards:+4", "kind=concurrency&more=most:+5%0Alease:+90s",
		"kind=calendar+window&rate=1e3&more=resets:+week%0D%0Afirst_weekday:+monday%0Azone:+Europe/Berlin",
		"kind=fixed+window&rate=1&period=1us&more=start:+2026-01-01T00:00:00Z", "rate=1,5&period=1e300", "rate=1&period=1s&more=mode:+off",
		"rate=1&period=1s&more=rate:+2", "rate=1&period=1s&more=-+limit:+b",
		"rate=1&period=3.3333333333w", "%zz", "rate=NaN", "rate=Inf&period=1s", "rate=1e999", "rate=1&period=1s&more=%22",
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
