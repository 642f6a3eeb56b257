package integration_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TestSlidingWindowBesideItsOtherDefinitions has two programs use a limit at once, which define it otherwise.
func TestSlidingWindowBesideItsOtherDefinitions(t *testing.T) {
	t.Parallel()
	b := setup(t)
	window := ratelimit.SlidingWindow{Rate: 20, Period: time.Minute, Slices: 6}
	for name, other := range map[string]ratelimit.Policy{
		"MoreSlices":   ratelimit.SlidingWindow{Rate: 20, Period: time.Minute, Slices: 60},
		"FewerSlices":  ratelimit.SlidingWindow{Rate: 20, Period: time.Minute, Slices: 1},
		"LowerRate":    ratelimit.SlidingWindow{Rate: 12, Period: time.Minute, Slices: 6},
		"HigherRate":   ratelimit.SlidingWindow{Rate: 40, Period: time.Minute, Slices: 6},
		"LongerPeriod": ratelimit.SlidingWindow{Rate: 20, Period: time.Hour, Slices: 6},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := b.slidingDesk(t, ratelimit.Config{})
			now, then := ratelimit.Define(name, window).For("a"), ratelimit.Define(name, other).For("a")
			for i := range 5 {
				d.at(time.Duration(i) * 5 * time.Second)
				d.requireTake(t, 0, now)
				d.requireTake(t, 0, then)
			}
			require.InDelta(t, 10, d.tokens(t, now), 0)
			require.InDelta(t, then.Limit().Capacity()-10, d.tokens(t, then), 0)
			d.at(55 * time.Second)
			require.InDelta(t, 10, d.tokens(t, now), 0, "nothing has fallen out")
		})
	}
	t.Run("ATokenBucket", func(t *testing.T) {
		t.Parallel()
		d := b.slidingDesk(t, ratelimit.Config{})
		slides, steps := ratelimit.Define("kinds", window).For("a"), ratelimit.Define("kinds", hoard(20)).For("a")
		for range 5 {
			d.requireTake(t, 0, slides)
			d.requireTake(t, 0, steps)
		}
		require.InDelta(t, 10, d.tokens(t, slides), 0)
		require.InDelta(t, 10, d.tokens(t, steps), 1e-3)
		d.at(75 * time.Second)
		require.InDelta(t, 20, d.tokens(t, slides), 0)
	})
}

// TestSlidingWindowByRules has a rule change the policy at an instant.
func TestSlidingWindowByRules(t *testing.T) {
	t.Parallel()
	b := setup(t)
	window := func(rate float64, period time.Duration, slices int) ratelimit.Policy {
		return ratelimit.SlidingWindow{Rate: rate, Period: period, Slices: slices}
	}
	for name, c := range map[string]struct {
		eraChange
		tokens float64 // of which 8 of 20 were taken half a minute before the change
		retry  time.Duration
	}{
		"Keep":        {eraChange{window(20, time.Minute, 6), window(10, time.Minute, 6), ratelimit.KeepTokens}, 2, 40 * time.Second},
		"Add":         {eraChange{window(20, time.Minute, 6), window(30, time.Minute, 6), ratelimit.AddTokens}, 22, 40 * time.Second},
		"Scale":       {eraChange{window(20, time.Minute, 6), window(10, time.Minute, 6), ratelimit.ScaleTokens}, 6, 40 * time.Second},
		"Reset":       {eraChange{window(20, time.Minute, 6), window(10, time.Minute, 6), ratelimit.ResetTokens}, 10, 0},
		"Lower":       {eraChange{window(20, time.Minute, 6), window(5, time.Minute, 6), ratelimit.KeepTokens}, -3, 40 * time.Second},
		"LongSlices":  {eraChange{window(20, time.Minute, 6), window(10, time.Minute, 1), ratelimit.KeepTokens}, 2, 60 * time.Second},
		"FromABucket": {eraChange{slowly(20, 1), window(20, time.Minute, 6), ratelimit.KeepTokens}, 12, 70 * time.Second},
		"FromShards":  {eraChange{slowly(16, 4), window(16, time.Minute, 6), ratelimit.ResetTokens}, 16, 0},
		"ToABucket":   {eraChange{window(20, time.Minute, 6), ratelimit.TokenBucket{Rate: 20, Period: 20 * time.Second}, ratelimit.KeepTokens}, 12, 8 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rules := eraRules{name: c.rule(t, ratelimit.Define(name, hoard(1)))}
			d := b.slidingDesk(t, ratelimit.Config{Policies: rules})
			request := ratelimit.Define(name, hoard(1)).For("a")
			d.at(-30 * time.Second)
			d.requireTake(t, 0, request.Cost(8))
			d.at(0)
			require.InDelta(t, c.tokens, d.tokens(t, request), 1e-3)
			whole := request.Cost(map[bool]float64{true: 1, false: max(c.tokens, 0) + 1}[c.retry == 0])
			if name == "ToABucket" {
				whole = request.Cost(20)
			}
			decision, err := d.Take(t.Context(), whole)
			require.NoError(t, err)
			require.Equal(t, c.retry, decision.RetryAfter)
			if c.retry == 0 {
				return
			}
			if c.tokens > 0 {
				d.requireTake(t, 0, request)
				require.NoError(t, d.Credit(t.Context(), request))
			}
			d.at(c.retry)
			d.requireTake(t, 0, whole)
		})
	}
}
