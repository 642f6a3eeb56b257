package httplimit_test

import (
	"context"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// The Refusal for Config.Refused of the limiter names the route, for limits that are enforced and in shadow mode.
func TestRefusalsAreToldWithTheRoute(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var mu sync.Mutex
	told := map[string]bool{} // whether it was a shadow, by limit and route
	once, tried := ratelimit.Define("once", ratelimit.PerDay(1)), ratelimit.Define("tried", ratelimit.PerDay(1))
	limiter, err := ratelimit.New(b.pool, ratelimit.Config{AsOf: b.clock, Policies: ratelimit.ShadowLimits(tried), Refused: func(_ context.Context, r ratelimit.Refusal) {
		mu.Lock()
		defer mu.Unlock()
		told[r.Limit+" "+r.Route] = r.Shadow
	}})
	require.NoError(t, err)
	for _, route := range []string{"POST /chat", ""} {
		handler := b.limitedOn(t, limiter, httplimit.Config{Route: route, Limits: []httplimit.Limit{
			userLimit, {Limit: tried, Global: true},
		}}, respond())
		for range 2 {
			do(handler, request(t))
		}
		handler = b.limitedOn(t, limiter, httplimit.Config{Route: route, Limits: []httplimit.Limit{{Limit: once, Global: true}}}, respond())
		for range 2 {
			do(handler, request(t))
		}
	}
	require.Equal(t, map[string]bool{
		"tried POST /chat": true, "once POST /chat": false, "tried ": true, "once ": false, "perUser ": false,
	}, told)
}
