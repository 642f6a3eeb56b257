package ratelimit_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func TestConcurrencyChecksItsFields(t *testing.T) {
	t.Parallel()
	for text, policy := range map[string]ratelimit.Concurrency{
		"from 1 to 1000 slots":       {},
		"its Most is -1":             {Most: -1},
		"its Most is 1001":           {Most: 1001},
		"its Lease is 30ns":          {Most: 1, Lease: 30},
		"its Lease is 1.0000005s":    {Most: 1, Lease: time.Second + 500},
		"its Lease is 24h0m0.00001s": {Most: 1, Lease: ratelimit.Day + 10*time.Microsecond},
		"its Lease is -1m0s":         {Most: 1, Lease: -time.Minute},
	} {
		_, err := ratelimit.NewLimit("jobs", policy)
		require.ErrorIs(t, err, ratelimit.ErrInvalidLimit)
		require.ErrorContains(t, err, text)
	}
	require.Equal(t, "jobs: 5 at a time, leases of 1m", ratelimit.Define("jobs", ratelimit.Concurrency{Most: 5}).String())
	ratelimit.Define("jobs", ratelimit.Concurrency{Most: 1000, Lease: ratelimit.Day})
	ratelimit.Define("jobs", ratelimit.Concurrency{Most: 1, Lease: time.Millisecond})
}

// A Value acquires slots as Acquire does, and frees them as leases end.
func TestAValueOfSlots(t *testing.T) {
	t.Parallel()
	noon := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	v := ratelimit.Define("jobs", ratelimit.Concurrency{Most: 3}).For("ada").Full(noon)
	require.InDelta(t, 3, v.Tokens, 0)
	v, d := v.Take(noon, 2)
	require.True(t, d.Allowed)
	require.Equal(t, time.Minute, d.ResetAfter)
	v, d = v.Take(noon.Add(time.Second), 1)
	require.True(t, d.Allowed)
	after, d := v.Take(noon.Add(2*time.Second), 2)
	require.False(t, d.Allowed)
	require.Equal(t, 58*time.Second, d.RetryAfter)
	require.Equal(t, v.At(noon.Add(2*time.Second)), after.Tokens)
	require.InDelta(t, 0, v.At(noon.Add(time.Minute-time.Microsecond)), 0)
	require.InDelta(t, 2, v.At(noon.Add(time.Minute)), 0)
	require.InDelta(t, 3, v.At(noon.Add(61*time.Second)), 0)
	for cost, want := range map[float64]time.Duration{1: 50 * time.Second, 2: 50 * time.Second, 3: 51 * time.Second} {
		wait, err := v.RetryAfter(noon.Add(10*time.Second), cost)
		require.NoError(t, err)
		require.Equal(t, want, wait)
	}
	_, err := v.RetryAfter(noon, 4)
	require.ErrorIs(t, err, ratelimit.ErrCostExceedsCapacity)
	for _, cost := range []float64{0.5, 4} {
		_, d = v.Take(noon.Add(time.Hour), cost)
		require.False(t, d.Allowed)
		require.Greater(t, d.RetryAfter, 200*365*ratelimit.Day)
	}
	_, r := v.Reserve(noon.Add(time.Hour), 1)
	require.False(t, r.Allowed)
}

func TestASimulationHoldsNoSlots(t *testing.T) {
	t.Parallel()
	s, err := ratelimit.NewSimulation(ratelimit.Config{})
	require.NoError(t, err)
	_, err = s.Take(t.Context(), time.Now(), ratelimit.Define("jobs", ratelimit.Concurrency{Most: 3}).For("ada"))
	require.ErrorIs(t, err, ratelimit.ErrInvalidRequest)
	require.ErrorContains(t, err, "a Simulation is not told when slots are given back")
	require.Zero(t, s.Buckets())
}
