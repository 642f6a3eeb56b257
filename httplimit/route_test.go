package httplimit_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TestTheRouteIsTold promises the route in each Answered for the Observer, and in each Refusal for Config.Refused, for limits that are
// enforced and in shadow mode.
func TestTheRouteIsTold(t *testing.T) {
	t.Parallel()
	b, refused := setup(t), map[string]bool{} // whether it was a shadow, by limit and route
	once, tried := ratelimit.Define("once", ratelimit.PerDay(1)), ratelimit.Define("tried", ratelimit.PerDay(1))
	limiter, err := ratelimit.New(b.db, ratelimit.Config{
		AsOf: b.clock.Now, Policies: ratelimit.ShadowLimits(tried), Observer: b.told,
		Refused: func(_ context.Context, r ratelimit.Refusal) { refused[r.Limit+" "+r.Route] = r.Shadow },
	})
	require.NoError(t, err)
	config := httplimit.Config{Route: "POST /chat", Limits: []httplimit.Limit{{Limit: once, Key: user}, {Limit: tried, Global: true}}}
	handler := b.limitedOn(t, limiter, config, respond())
	for _, name := range []string{"ada", "bob", "ada", ""} {
		do(handler, request(t, "X-User", name))
	}
	require.Equal(t, map[string]bool{"tried POST /chat": true, "once POST /chat": false}, refused)
	require.Equal(t, []string{
		"allowed once", "allowed once", "shadow_refused tried", "refused once", "shadow_refused tried", "bad_key once",
	}, b.told.results())
	for _, answered := range b.told.answered {
		require.Equal(t, "POST /chat", answered.Route)
	}
	require.ErrorIs(t, b.told.answered[5].Err, httplimit.ErrNoKey)
}
