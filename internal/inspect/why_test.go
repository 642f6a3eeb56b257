package inspect_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/inspect"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TestWhy promises the sentence about a refusal, and its end.
func TestWhy(t *testing.T) {
	t.Parallel()
	quota := ratelimit.Define("quota", ratelimit.TokenBucket{Rate: 10, Period: time.Minute})
	slots := ratelimit.Define("slots", ratelimit.Concurrency{Slots: 2, Lease: time.Hour})
	for name, test := range map[string]struct {
		limit        ratelimit.Limit
		used, asked  float64
		change       func(l *inspect.Level)
		why          string
		refusedUntil time.Duration
	}{
		"Allowed":   {quota, 9, 1, nil, "", 0},
		"UsedUp":    {quota, 9.5, 1, nil, "0.5 of 10 left", 3 * time.Second},
		"Costs":     {quota, 9, 3, func(l *inspect.Level) { l.Unit = "calls" }, "1 of 10 calls left, and a request costs 3", 12 * time.Second},
		"Owes":      {quota, 12, 1, nil, "it owes 2", 18 * time.Second},
		"NeverFits": {quota, 0, 11, nil, "a request costs 11, and the limit allows at most 10", 0},
		"Held":      {slots, 2, 1, nil, "2 of 2 slots are held", time.Hour},
		"Paused": {quota, 0, 1, func(l *inspect.Level) {
			l.PausedUntil, l.PauseReason = noon.Add(time.Hour), "a leak"
		}, "it is paused: a leak", time.Hour},
		"Shadow": {quota, 10, 1, func(l *inspect.Level) { l.Mode = ratelimit.Shadow }, "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			value := test.limit.For("ada").FullValue(noon)
			if test.used > test.limit.Capacity() {
				value, _ = value.Reserve(noon, test.used)
			} else {
				value, _ = value.Take(noon, test.used)
			}
			level := inspect.LevelOf(value)
			if test.change != nil {
				test.change(level)
			}
			why, until := level.Why(test.asked)
			require.Equal(t, test.why, why)
			if test.refusedUntil == 0 {
				require.Zero(t, until)
			} else {
				require.Equal(t, test.refusedUntil, until.Sub(noon))
			}
		})
	}
}
