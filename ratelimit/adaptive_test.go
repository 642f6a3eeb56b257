package ratelimit_test

import (
	"math"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

func TestAdaptiveIsChecked(t *testing.T) {
	t.Parallel()
	contract := ratelimit.PerSecond(100)
	for name, c := range map[string]struct {
		policy ratelimit.Adaptive
		says   string
	}{
		"NoContract":       {ratelimit.Adaptive{}, "Contract is a <nil>"},
		"OfItself":         {ratelimit.Adaptive{Contract: ratelimit.Adaptive{Contract: contract}}, "must be a TokenBucket"},
		"InvalidContract":  {ratelimit.Adaptive{Contract: ratelimit.TokenBucket{Rate: -1}}, "its Contract cannot be used: its Rate"},
		"FloorBelow":       {ratelimit.Adaptive{Contract: contract, Floor: 0.0001}, "Floor is 0.0001"},
		"FloorAbove":       {ratelimit.Adaptive{Contract: contract, Floor: 1.1}, "Floor is 1.1"},
		"FloorOfNothing":   {ratelimit.Adaptive{Contract: contract, Floor: math.NaN()}, "Floor is NaN"},
		"GrowthBelow":      {ratelimit.Adaptive{Contract: contract, Growth: -1}, "Growth is -1"},
		"GrowthAbove":      {ratelimit.Adaptive{Contract: contract, Growth: 2}, "Growth is 2"},
		"GrowthOfNothing":  {ratelimit.Adaptive{Contract: contract, Growth: math.NaN()}, "Growth is NaN"},
		"EpochTooShort":    {ratelimit.Adaptive{Contract: contract, Epoch: time.Millisecond}, "Epoch is 1ms"},
		"EpochTooLong":     {ratelimit.Adaptive{Contract: contract, Epoch: 2 * time.Hour}, "Epoch is 2h0m0s"},
		"EpochBackwards":   {ratelimit.Adaptive{Contract: contract, Epoch: -time.Second}, "Epoch is -1s"},
		"SlidingContract":  {ratelimit.Adaptive{Contract: ratelimit.SlidingWindow{Rate: 1, Period: time.Second}}, "must be a TokenBucket"},
		"HoldingContract":  {ratelimit.Adaptive{Contract: ratelimit.Concurrency{Most: 1}}, "must be a TokenBucket"},
		"InfiniteGrowth":   {ratelimit.Adaptive{Contract: contract, Growth: math.Inf(1)}, "Growth is +Inf"},
		"PointersContract": {ratelimit.Adaptive{Contract: &contract}, "must be a TokenBucket"},
	} {
		_, err := ratelimit.NewLimit("upstream", c.policy)
		require.ErrorIs(t, err, ratelimit.ErrInvalidLimit, name)
		require.ErrorContains(t, err, c.says, name)
	}
	for _, policy := range []ratelimit.Adaptive{
		{Contract: contract},
		{Contract: contract, Floor: 1, Growth: 1, Epoch: time.Hour, Apply: true},
		{Contract: contract, Floor: 0.001, Growth: 0.001, Epoch: 100 * time.Millisecond},
		{Contract: ratelimit.FixedWindow{Rate: 1, Period: time.Hour}},
		{Contract: ratelimit.TokenBucket{Rate: 1, Period: time.Second, Capacity: ratelimit.None}},
	} {
		limit, err := ratelimit.NewLimit("upstream", policy)
		require.NoError(t, err)
		require.Equal(t, policy, limit.Policy())
	}
}

func TestAdaptiveInWords(t *testing.T) {
	t.Parallel()
	policy := ratelimit.Adaptive{Contract: ratelimit.PerSecond(100)}
	require.Equal(t, "100 per second, adapting down to 0.1 of it, in shadow", policy.String())
	policy.Apply, policy.Floor = true, 0.25
	require.Equal(t, "100 per second, adapting down to 0.25 of it", policy.String())
}

// A simulation has no upstream. It uses the price of the request, if any.
func TestAdaptiveInASimulation(t *testing.T) {
	t.Parallel()
	s, err := ratelimit.NewSimulation(ratelimit.Config{})
	require.NoError(t, err)
	request := ratelimit.Define("upstream", ratelimit.Adaptive{Contract: ratelimit.PerSecond(100), Apply: true}).For("account")
	at := time.Unix(0, 0)
	d, err := s.Take(t.Context(), at, request)
	require.NoError(t, err)
	require.Equal(t, 1.0, d.States[0].Price)
	require.Equal(t, 99.0, d.Remaining)
	d, err = s.Take(t.Context(), at, request.Price(4))
	require.NoError(t, err)
	require.Equal(t, 4.0, d.States[0].Price)
	require.Equal(t, 1.0, d.States[0].Cost)
	require.Equal(t, 95.0, d.Remaining)
}

func TestAnAdaptiveLimitWorksBefore1970(t *testing.T) {
	t.Parallel()
	api := ratelimit.Define("api", ratelimit.Adaptive{Contract: ratelimit.PerDay(20), Apply: true})
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int64
		asOf := func() time.Time { return time.Unix(-1e6+asked.Add(1), 0) }
		limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{AsOf: asOf})
		require.NoError(t, err)
		for i := range 3 {
			d, err := limiter.Take(t.Context(), api.For("ada"))
			require.NoError(t, err)
			require.True(t, d.Allowed, "take %d: %v", i, d)
			require.NoError(t, limiter.Report(t.Context(), api.For("ada"), ratelimit.Outcome{}))
			synctest.Wait() // until an exchange of prices has ended
		}
	})
}
