package httplimit_test

import (
	"net/http"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TestAShadowNeverVetoes promises that a limit in shadow mode takes as if it were enforced, that a refusal of it is counted and
// the request goes on, and that the client does not see it.
func TestAShadowNeverVetoes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	watched := ratelimit.Define("watched", ratelimit.PerDay(2))
	b.inShadow(t, watched)
	handler := b.limited(t, limits(httplimit.Limit{Limit: watched, Global: true}, userLimit), respond())
	for range 3 {
		w := do(handler, request(t))
		require.Equal(t, http.StatusOK, w.Code)
		require.NotContains(t, w.Header().Get("RateLimit-Policy")+w.Header().Get("RateLimit"), "watched")
	}
	require.NoError(t, b.limiter.Reset(t.Context(), watched.Global()))
	require.Equal(t, http.StatusTooManyRequests, do(handler, request(t)).Code)
	require.Zero(t, b.charged(t, watched.Global()), "a refused request is charged nothing")
	require.Equal(t, 3.0, b.charged(t, perUser.For("ada")))
	require.Equal(t, []string{
		"allowed watched", "allowed watched", "allowed watched", "shadow_refused watched", "refused perUser",
	}, b.told.results())
}

// TestShadowsDoNotStandInEachOthersWay promises that each limit in shadow mode takes by itself. A limit in shadow mode without a
// key, or with a capacity below the cost, refuses no request.
func TestShadowsDoNotStandInEachOthersWay(t *testing.T) {
	t.Parallel()
	b := setup(t)
	empty := ratelimit.Define("empty", ratelimit.PerDay(1))
	b.inShadow(t, empty, perUser, perPlan, everyone)
	b.take(t, empty.Global())
	handler := b.limited(t, limits(
		httplimit.Limit{Limit: empty, Global: true},
		httplimit.Limit{Limit: perUser, Key: user},
		httplimit.Limit{Limit: perPlan, Key: func(*http.Request) (string, error) { return "", nil }},
		httplimit.Limit{Limit: everyone, Global: true, Cost: httplimit.StatedCost{Header: "X-Tokens"}},
	), respond())
	w := do(handler, request(t, "X-Tokens", "1001"))
	require.Equal(t, http.StatusOK, w.Code)
	requireNoFields(t, w.Header())
	require.Equal(t, 1.0, b.charged(t, perUser.For("ada")))
	require.Equal(t, []string{"shadow_bad_key perPlan", "allowed empty", "shadow_refused empty"}, b.told.results())
}

// TestShadowForAPlan promises that the mode of a limit that cannot be asked is the mode of the caller's plan.
func TestShadowForAPlan(t *testing.T) {
	t.Parallel()
	b, s := setupStored(t)
	s.set(t, perUser, "free", mode(ratelimit.Shadow))
	fails := func(*http.Request) (float64, error) { return 0, httplimit.ErrInvalidCost }
	handler := b.limited(t, limits(httplimit.Limit{Limit: perUser, Key: user, Plan: httplimit.Header("X-Plan"), Cost: httplimit.CostFunc(fails)}), respond())
	require.Equal(t, http.StatusOK, do(handler, request(t, "X-Plan", "free")).Code)
	require.Equal(t, http.StatusBadRequest, do(handler, request(t, "X-Plan", "pro")).Code)
	require.Equal(t, []string{"shadow_bad_cost perUser", "bad_cost perUser"}, b.told.results())
}

// TestAShadowIsSettledAndCreditedToo promises that Settle and Credit return the tokens of a limit in shadow mode as for an enforced
// limit, but none for a request that it would have refused.
func TestAShadowIsSettledAndCreditedToo(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.inShadow(t, perUser, perPlan)
	handler := b.limited(t, limits(
		httplimit.Limit{Limit: perUser, Key: user, Cost: httplimit.StatedCost{Header: "X-Tokens"}, Credit: httplimit.CreditOn5xx},
		httplimit.Limit{Limit: perPlan, Key: user, Cost: httplimit.FixedCost(10)},
	), inline(func(e exchange) {
		require.NoError(t, e.admission.Settle(e.r.Context(), 4, perPlan))
		status, err := strconv.Atoi(e.r.Header.Get("X-Status"))
		require.NoError(t, err)
		e.w.WriteHeader(status)
	}))
	do(handler, request(t, "X-Status", "200", "X-Tokens", "3"))
	do(handler, request(t, "X-Status", "500", "X-Tokens", "2"))
	require.Equal(t, 3.0, b.charged(t, perUser.For("ada")), "the second request took nothing")
	require.Equal(t, 8.0, b.charged(t, perPlan.For("ada")))
	require.NoError(t, b.limiter.Reset(t.Context(), perUser.For("ada")))
	do(handler, request(t, "X-Status", "500", "X-Tokens", "2"))
	require.Zero(t, b.charged(t, perUser.For("ada")))
}
