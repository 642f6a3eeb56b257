package rules_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

func TestOutlookSaysWhatAChangeLeaves(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, time.November, 15, 12, 0, 0, 0, time.UTC)
	calendar := func(n float64) ratelimit.Policy { return ratelimit.CalendarWindow{Rate: n, Resets: ratelimit.Monthly} }
	fixed := func(n float64) ratelimit.Policy {
		return ratelimit.FixedWindow{Rate: n, Period: 24 * time.Hour, Start: at.Truncate(24 * time.Hour)}
	}
	bucket := func(n float64) ratelimit.Policy { return ratelimit.TokenBucket{Rate: n, Period: time.Minute} }
	sliding := func(n float64) ratelimit.Policy { return ratelimit.SlidingWindow{Rate: n, Period: time.Hour} }
	wide := func(n float64) ratelimit.Policy {
		return ratelimit.TokenBucket{Rate: n, Period: time.Minute, Shards: 4}
	}
	for name, test := range map[string]struct {
		before, after ratelimit.Policy
		change        ratelimit.OnChange
		want          string
	}{
		"Raised":         {calendar(1000), calendar(10_000), "", "a key with 0 of 1000 left will have 9000 of 10000, and one with 500 left will have 9500, until 2026-12-01 00:00:00Z"},
		"Lowered":        {calendar(10_000), calendar(1000), "", "a key with 0 of 10000 left will have 0 of 1000, and one with 5000 left will have 0, until 2026-12-01 00:00:00Z"},
		"Kept":           {calendar(1000), calendar(10_000), ratelimit.KeepTokens, "a key with 0 of 1000 left will have 0 of 10000, and one with 500 left will have 500, until 2026-12-01 00:00:00Z"},
		"Fixed":          {fixed(100), fixed(200), "", "a key with 0 of 100 left will have 100 of 200, and one with 50 left will have 150, until the window ends, within 24h"},
		"Sliding":        {sliding(100), sliding(200), "", "a key with 0 of 100 left will have 100 of 200, and one with 50 left will have 150, and what was used counts for 1h"},
		"TokenBucket":    {bucket(60), bucket(600), "", "a key with 0 of 60 left will have 0 of 600, and one with 30 left will have 30; from then on tokens arrive at 600 per minute"},
		"Carried":        {bucket(60), bucket(600), ratelimit.CarryUsage, "a key with 0 of 60 left will have 540 of 600, and one with 30 left will have 570; from then on tokens arrive at 600 per minute"},
		"ByRow":          {wide(80), wide(800), "", "a key with 0 of 80 left will have 0 of 800, and one with 40 left will have 40; from then on tokens arrive at 800 per minute"},
		"Reset":          {calendar(1000), calendar(1000), ratelimit.ResetTokens, "a key with 0 of 1000 left will have 1000 of 1000, and one with 500 left will have 1000"},
		"AnotherKind":    {bucket(1000), calendar(1000), "", "a key with 0 of 1000 left will have 1000 of 1000, and one with 500 left will have 1000"},
		"TheSame":        {calendar(1000), calendar(1000), "", ""},
		"Slots":          {ratelimit.Concurrency{Slots: 5}, ratelimit.Concurrency{Slots: 10}, "", ""},
		"NoneIsKnown":    {nil, calendar(1000), "", "what a key will have depends on its plan or on the code, which the tables do not have"},
		"Invalid":        {calendar(-1), calendar(1000), "", ""},
		"InvalidChanges": {calendar(1), calendar(1000), "half", ""},
	} {
		require.Equal(t, test.want, rules.Outlook(test.before, test.after, test.change, at), name)
	}
	require.Equal(t, "a key with 12.5 of 1000 left will have 9012.5 of 10000, until 2026-12-01 00:00:00Z",
		rules.Outlook(calendar(1000), calendar(10_000), "", at, 12.5))
	require.Equal(t, "a key with 60 of 60 left will have 600 of 600", rules.Outlook(bucket(60), bucket(600), ratelimit.CarryUsage, at, 60))
	require.Empty(t, rules.Outlook(bucket(60), bucket(600), "", at, -1), "a debt cannot be simulated")
}
