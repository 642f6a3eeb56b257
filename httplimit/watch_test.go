package httplimit_test

import (
	"net/http"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TestAShadowRuleNeverVetoes promises that a rule in shadow mode takes as if it were enforced, that what it would
// refuse is counted and let through, and that the client does not see it.
func TestAShadowRuleNeverVetoes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	watched := ratelimit.Define("watched", ratelimit.PerDay(2))
	handler := b.limited(t, rules(
		httplimit.Rule{Limit: watched, Global: true, Shadow: true},
		userRule,
	), respond())
	for range 3 {
		w := do(handler, request(t))
		require.Equal(t, http.StatusOK, w.Code)
		policies, limits := requireDraftFields(t, w.Header())
		require.NotContains(t, policies, "watched")
		require.NotContains(t, limits, "watched")
	}
	require.Equal(t, http.StatusTooManyRequests, do(handler, request(t)).Code)
	require.Equal(t, 2.0, b.charged(t, watched.Global()))
	require.Equal(t, 3.0, b.charged(t, perUser.For("ada")))
	require.Equal(t, []string{
		"allowed perUser", "shadow_allowed watched",
		"allowed perUser", "shadow_allowed watched",
		"allowed perUser", "shadow_refused watched",
		"refused perUser", // and the rule in shadow mode is not asked, as it would not be charged
	}, b.told.results())
}

func TestShadowRulesDoNotStandInEachOthersWay(t *testing.T) {
	t.Parallel()
	b := setup(t)
	empty := ratelimit.Define("empty", ratelimit.PerDay(1))
	b.take(t, empty.Global())
	handler := b.limited(t, rules(
		httplimit.Rule{Limit: empty, Global: true, Shadow: true},
		httplimit.Rule{Limit: perUser, Key: user, Shadow: true},
		httplimit.Rule{Limit: perPlan, Shadow: true, Key: func(*http.Request) (string, error) { return "", nil }},
		httplimit.Rule{Limit: everyone, Global: true, Shadow: true, Cost: httplimit.StatedCost{Header: "X-Tokens"}},
	), respond())
	w := do(handler, request(t, "X-Tokens", "1001"))
	require.Equal(t, http.StatusOK, w.Code)
	requireNoFields(t, w.Header())
	require.Equal(t, 1.0, b.charged(t, perUser.For("ada")))
	results := b.told.results()
	slices.Sort(results) // they are asked at once
	require.Equal(t, []string{"shadow_allowed perUser", "shadow_bad_key perPlan", "shadow_refused empty", "shadow_too_costly everyone"}, results)
}

// TestShadowForAll promises that a whole middleware in shadow mode decides as it would when enforced, all or
// nothing.
func TestShadowForAll(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handler := b.limited(t, httplimit.Config{
		Rules:  []httplimit.Rule{userRule, {Limit: everyone, Global: true}},
		Shadow: true,
	}, inline(func(e exchange) { require.Empty(t, e.admission.Decision().States) }))
	for range 5 {
		w := do(handler, request(t))
		require.Equal(t, http.StatusOK, w.Code)
		requireNoFields(t, w.Header())
	}
	anonymous := request(t)
	anonymous.Header.Del("X-User")
	require.Equal(t, http.StatusOK, do(handler, anonymous).Code)
	require.Equal(t, 3.0, b.charged(t, perUser.For("ada")))
	require.Equal(t, 4.0, b.charged(t, everyone.Global()))
	require.Equal(t, []string{
		"shadow_allowed perUser everyone", "shadow_allowed perUser everyone", "shadow_allowed perUser everyone",
		"shadow_refused perUser", "shadow_refused perUser",
		"shadow_bad_key perUser", "shadow_allowed everyone",
	}, b.told.results())
}

func TestAShadowRuleIsSettledAndRefundedToo(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handler := b.limited(t, rules(
		httplimit.Rule{Limit: perUser, Key: user, Shadow: true, Refund: httplimit.RefundOn5xx},
		httplimit.Rule{Limit: perPlan, Key: user, Shadow: true, Cost: httplimit.FixedCost(10)},
	), inline(func(e exchange) {
		require.NoError(t, e.admission.Settle(e.r.Context(), 4, perPlan))
		e.w.WriteHeader(http.StatusInternalServerError)
	}))
	do(handler, request(t))
	require.Zero(t, b.charged(t, perUser.For("ada")))
	require.Equal(t, 4.0, b.charged(t, perPlan.For("ada")))
}

func TestAShadowRuleIsNotWaitedForWhenTheStoreFails(t *testing.T) {
	t.Parallel()
	s := newStand(t)
	down(t, s)
	handler := s.limitedOn(t, s.asked, httplimit.Config{FailOpen: true, Rules: []httplimit.Rule{
		userRule,
		{Limit: everyone, Global: true, Shadow: true},
	}}, respond())
	require.Equal(t, http.StatusOK, do(handler, request(t)).Code)
	require.Equal(t, []string{"failed_open perUser"}, s.told.results())
}
