package ratelimit_test

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

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
