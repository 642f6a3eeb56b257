package httplimit_test

import (
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// States of limits in a call over several limits.
var (
	allowedState = ratelimit.State{Limit: rpm, Cost: 1, Allowed: true, Mode: ratelimit.On, Remaining: 59, ResetAfter: time.Second}
	triedState   = ratelimit.State{Limit: rpd, Cost: 1, Mode: ratelimit.Shadow, RetryAfter: time.Hour}
	offState     = ratelimit.State{Limit: rpd, Cost: 1, Allowed: true, Mode: ratelimit.Off, NotAsked: true}
	refusedState = ratelimit.State{Limit: rpm, Cost: 1, Mode: ratelimit.On, RetryAfter: 2 * time.Second}
	leftAlone    = ratelimit.State{Limit: rpm, Cost: 1, Allowed: true, Mode: ratelimit.On, NotAsked: true}
	pausedState  = ratelimit.State{
		Limit: rpd, Cost: 1, Mode: ratelimit.On, NotAsked: true, RetryAfter: 90*time.Second + time.Microsecond,
		PausedUntil: ten.Add(90*time.Second + time.Microsecond), PauseReason: "the provider is down",
	}
)

func decision(allowed bool, states ...ratelimit.State) ratelimit.Decision {
	d := ratelimit.Decision{Allowed: allowed, At: ten, States: states}
	for _, s := range states {
		if !allowed && s.Mode != ratelimit.Shadow {
			d.RetryAfter = max(d.RetryAfter, s.RetryAfter)
		}
	}
	return d
}

// TestFieldsOmitLimitsThatAreNotEnforced promises that neither the fields nor the refusal name a limit in shadow mode
// or off, and 0 remaining tokens for a paused limit until its pause ends.
func TestFieldsOmitLimitsThatAreNotEnforced(t *testing.T) {
	t.Parallel()
	const (
		draft  = httplimit.DraftHeaders
		policy = `"rpm";q=60;w=60`
		daily  = `"rpd";q=1000;w=86400`
	)
	refusal := decision(false, triedState, refusedState, offState)
	for name, c := range map[string]struct {
		form     httplimit.Headers
		decision ratelimit.Decision
		want     map[string]string
	}{
		"Shadow":      {draft, decision(true, triedState, allowedState), map[string]string{"Ratelimit-Policy": policy, "Ratelimit": `"rpm";r=59;t=59`}},
		"Off":         {draft, decision(true, offState, allowedState), map[string]string{"Ratelimit-Policy": policy, "Ratelimit": `"rpm";r=59;t=59`}},
		"Nothing":     {draft, ratelimit.Decision{}, map[string]string{}},
		"Refused":     {draft, refusal, map[string]string{"Ratelimit-Policy": policy, "Ratelimit": `"rpm";r=0;t=2`}},
		"OnlyShadow":  {draft, decision(true, triedState), map[string]string{}},
		"OnlyOff":     {httplimit.Draft06Headers, decision(true, offState), map[string]string{}},
		"Paused":      {draft, decision(false, leftAlone, pausedState), map[string]string{"Ratelimit-Policy": daily, "Ratelimit": `"rpd";r=0;t=91`}},
		"PausedTrio":  {httplimit.Draft06Headers, decision(false, leftAlone, pausedState), map[string]string{"Ratelimit-Limit": "1000", "Ratelimit-Remaining": "0", "Ratelimit-Reset": "91"}},
		"ShadowTrio":  {httplimit.Draft06Headers, decision(true, triedState, allowedState), map[string]string{"Ratelimit-Limit": "60", "Ratelimit-Remaining": "59", "Ratelimit-Reset": "1"}},
		"ShadowEpoch": {httplimit.EpochHeaders, decision(true, triedState, allowedState), map[string]string{"X-Ratelimit-Limit": "60", "X-Ratelimit-Remaining": "59", "X-Ratelimit-Reset": "1773050401"}},
	} {
		header, want := http.Header{}, http.Header{}
		for field, value := range c.want {
			want.Set(field, value)
		}
		c.form.Set(header, c.decision)
		require.Equal(t, want, header, name)
	}
	answer := httplimit.NewRefusal(refusal)
	require.Equal(t, []string{"rpm"}, answer.Violated)
	require.Equal(t, "rpm: 60 per minute; retry in 2 s", answer.Detail)
	require.Equal(t, "quota-exceeded", answer.Reason)
}

// mode is a revision that keeps the code's policy.
func mode(m ratelimit.Mode) ratelimit.Revision { return ratelimit.Revision{Mode: m} }

// TestALimitThatIsOffAllowsAnyCost promises that a limit whose rule is off allows a request of any cost, takes nothing
// and is in no field.
func TestALimitThatIsOffAllowsAnyCost(t *testing.T) {
	t.Parallel()
	b, s := setupStored(t)
	b.take(t, perUser.For("ada").Cost(3))
	rule := userLimit
	rule.Cost = httplimit.StatedCost{Header: "X-Tokens"}
	rule.Credit = httplimit.CreditOn5xx
	handler := b.limited(t, limits(rule), inline(func(e exchange) {
		s.drop(perUser) // a request allowed while off is not settled when the limit is on again
		require.NoError(t, e.admission.Settle(t.Context(), 2, perUser))
		state, known := e.admission.State(perUser)
		require.True(t, known)
		require.Equal(t, ratelimit.Off, state.Mode)
		e.w.WriteHeader(http.StatusInternalServerError)
	}))
	for _, tokens := range []string{"1", "1000", "1e999"} {
		s.set(t, perUser, "", mode(ratelimit.Off))
		w := do(handler, request(t, "X-Tokens", tokens))
		require.Equal(t, http.StatusInternalServerError, w.Code)
		requireNoFields(t, w.Header())
	}
	require.Equal(t, 3.0, b.charged(t, perUser.For("ada")))
	require.Equal(t, http.StatusTooManyRequests, do(handler, request(t)).Code)
}

// TestOnlyEnforcedLimitsAnswer413 promises that a 413 names the limit that is in the way, and none that holds as little
// but is off or only tried.
func TestOnlyEnforcedLimitsAnswer413(t *testing.T) {
	t.Parallel()
	b, s := setupStored(t)
	s.set(t, perUser, "", mode(ratelimit.Off))
	s.set(t, rpm, "", mode(ratelimit.Shadow))
	costly := func(limit ratelimit.Limit) httplimit.Limit {
		return httplimit.Limit{Limit: limit, Key: user, Cost: httplimit.StatedCost{Header: "X-Tokens"}}
	}
	handler := b.limited(t, limits(costly(perUser), costly(rpm), costly(perPlan)), respond())
	require.Contains(t, do(handler, request(t, "X-Tokens", "101")).Body.String(), `"violated-policies":["perPlan"]`)
	require.Equal(t, http.StatusOK, do(handler, request(t, "X-Tokens", "100")).Code)
	require.Equal(t, []string{"too_costly perPlan", "allowed perUser", "shadow_refused rpm"}, b.told.results())
}

// TestAPausedLimitAnswers429UntilThePauseEnds promises that a pause refuses all requests, takes nothing from the other
// limits, and ends by itself. The answer says when, but not why.
func TestAPausedLimitAnswers429UntilThePauseEnds(t *testing.T) {
	t.Parallel()
	b, s := setupStored(t)
	s.set(t, perUser, "", of(ratelimit.PerMinute(3)))
	rule := s.RulingFor(perUser, "", "").Paused(ten.Add(90*time.Second+time.Microsecond), "the provider is down")
	s[storedKey{"perUser", ""}] = rule
	handler := b.limited(t, limits(httplimit.Limit{Limit: everyone, Global: true}, userLimit), respond())
	w := do(handler, request(t))
	require.Equal(t, http.StatusTooManyRequests, w.Code)
	require.Equal(t, "91", w.Header().Get("Retry-After"))
	require.Equal(t, "temporary-reduced-capacity", w.Header().Get("RateLimit-Reason"))
	require.Equal(t, `"perUser";r=0;t=91`, w.Header().Get("RateLimit"))
	require.NotContains(t, w.Body.String(), "provider")
	require.Equal(t, []string{"refused perUser"}, b.told.results())
	require.Zero(t, b.charged(t, everyone.Global()))

	b.clock.Set(ten.Add(91 * time.Second))
	require.Equal(t, http.StatusOK, do(handler, request(t)).Code)
}

// TestShadowForAPlan promises that the mode of a limit that cannot be asked is the mode of the caller's plan. A request
// with two plans is rejected.
func TestShadowForAPlan(t *testing.T) {
	t.Parallel()
	b, s := setupStored(t)
	s.set(t, perUser, "free", mode(ratelimit.Shadow))
	fails := func(*http.Request) (float64, error) { return 0, ratelimit.ErrInvalidCost }
	handler := b.limited(t, limits(httplimit.Limit{Limit: perUser, Key: user, Plan: httplimit.Header("X-Plan"), Cost: httplimit.CostFunc(fails)}), respond())
	require.Equal(t, http.StatusOK, do(handler, request(t, "X-Plan", "free")).Code)
	require.Equal(t, http.StatusBadRequest, do(handler, request(t, "X-Plan", "pro")).Code)
	twice := request(t, "X-Plan", "free")
	twice.Header.Add("X-Plan", "pro")
	require.Equal(t, http.StatusBadRequest, do(handler, twice).Code)
	require.Equal(t, []string{"shadow_bad_cost perUser", "bad_cost perUser", "bad_key perUser"}, b.told.results())
}

// TestSettleAndCreditOfALimitInShadow promises that Settle and Credit return the tokens of a limit in shadow mode as
// for an enforced limit, but none for a request that it would have refused.
func TestSettleAndCreditOfALimitInShadow(t *testing.T) {
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

// stored are rules that change while the program runs, by limit and plan.
type stored map[storedKey]*ratelimit.Ruling

type storedKey struct{ limit, plan string }

// RulingFor returns the rule of the plan, or else the rule of every plan.
func (s stored) RulingFor(limit ratelimit.Limit, plan, _ string) *ratelimit.Ruling {
	if rule := s[storedKey{limit.Name(), plan}]; rule != nil {
		return rule
	}
	return s[storedKey{limit.Name(), ""}]
}

func (stored) RulingsOf(string) []*ratelimit.Ruling { return nil }

// set stores a rule of one revision for the keys of a limit that are on a plan.
func (s stored) set(t *testing.T, limit ratelimit.Limit, plan string, revision ratelimit.Revision) {
	t.Helper()
	rule, err := ratelimit.NewRuling(limit, ratelimit.RulingConfig{Name: limit.Name() + "/" + plan, Revisions: []ratelimit.Revision{revision}})
	require.NoError(t, err)
	s[storedKey{limit.Name(), plan}] = rule
}

func (s stored) drop(limit ratelimit.Limit) { delete(s, storedKey{limit.Name(), ""}) }

// setupStored is setup with a limiter whose policies are stored.
func setupStored(t *testing.T) (*bundle, stored) {
	t.Helper()
	b, s := setup(t), stored{}
	b.policies = s
	b.limiter = b.on(t, b.db)
	return b, s
}

// planned is a rule of a limit by the user and the plan that the request's headers say.
func planned(limit ratelimit.Limit) httplimit.Limit {
	return httplimit.Limit{Limit: limit, Key: user, Plan: httplimit.Header("X-Plan")}
}

func of(policy ratelimit.Policy) ratelimit.Revision { return ratelimit.Revision{Policy: policy} }

// TestRulesMayHaveOtherCapacities promises that a request costs too much, or not, by the policy in effect when it
// comes. A rule can open a limit of capacity 0, and a settlement is booked on the rule's bucket, up to its capacity.
func TestRulesMayHaveOtherCapacities(t *testing.T) {
	t.Parallel()
	b, s := setupStored(t)
	shut := ratelimit.Define("shut", ratelimit.TokenBucket{Rate: 1, Period: time.Hour, Capacity: ratelimit.None})
	config := limits(planned(shut), httplimit.Limit{Limit: perUser, Key: user, Cost: httplimit.FixedCost(4)})
	without, err := ratelimit.New(b.db, ratelimit.Config{})
	require.NoError(t, err)
	_, err = httplimit.New(without, config)
	require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
	handler := b.limited(t, config, inline(func(e exchange) {
		require.NoError(t, e.admission.Settle(t.Context(), 500, perUser))
		require.NoError(t, e.admission.Settle(t.Context(), 1+1e-7, shut), "a difference that is nothing beside the rule's capacity")
	}))
	require.Contains(t, do(handler, request(t)).Body.String(), "shut allows at once; use up to 0")
	s.set(t, shut, "pro", of(ratelimit.PerHour(1000)))
	require.Contains(t, do(handler, request(t, "X-Plan", "pro")).Body.String(), "perUser allows at once; use up to 3")
	s.set(t, perUser, "", of(ratelimit.PerHour(1000)))
	require.Equal(t, http.StatusOK, do(handler, request(t, "X-Plan", "pro")).Code)
	for limit, left := range map[ratelimit.Limit]float64{perUser: 500, shut: 999} {
		v, err := b.limiter.Value(t.Context(), limit.For("ada").Plan("pro"))
		require.NoError(t, err)
		require.Equal(t, left, v.Tokens, limit.Name())
	}
	s.set(t, perUser, "", of(ratelimit.PerHour(2)))
	require.Contains(t, do(handler, request(t, "X-Plan", "pro")).Body.String(), "perUser allows at once; use up to 2")
	require.Equal(t, http.StatusRequestEntityTooLarge, do(handler, request(t, "X-Plan", "free")).Code)

	config.Limits[0].Unit = "Tokens!"
	_, err = httplimit.New(b.limiter, config)
	require.ErrorContains(t, err, "Unit", "what does not depend on a capacity is checked all the same")
}

// TestFieldsHaveTheDecidingPolicy promises that the fields have the quota, the window and the capacity of the rule that
// decided, and that two plans under one name have their own.
func TestFieldsHaveTheDecidingPolicy(t *testing.T) {
	t.Parallel()
	b, s := setupStored(t)
	s.set(t, perPlan, "pro", of(ratelimit.TokenBucket{Rate: 600, Period: time.Minute, Capacity: 900}))
	s.set(t, perPlan, "free", of(ratelimit.FixedWindow{Rate: 5, Period: ratelimit.Day, Start: ten.Add(-time.Hour)}))
	fields := func(headers httplimit.Headers, who, plan string) http.Header {
		config := limits(planned(perPlan))
		config.Headers = headers
		return do(b.limited(t, config, respond()), request(t, "X-User", who, "X-Plan", plan)).Header()
	}
	for _, c := range []struct{ who, plan, policy, limit string }{
		{"ada", "pro", `"perPlan";q=600;w=60`, `"perPlan";r=600;t=60`},
		{"bob", "free", `"perPlan";q=5;w=86400`, `"perPlan";r=4;t=82800`},
		{"cyd", "", `"perPlan";q=100;w=3600`, `"perPlan";r=99;t=3564`},
	} {
		got := fields(httplimit.DraftHeaders, c.who, c.plan)
		require.Equal(t, c.policy, got.Get("RateLimit-Policy"))
		require.Equal(t, c.limit, got.Get("RateLimit"))
	}
	trio := fields(httplimit.Draft06Headers, "ada", "pro")
	require.Equal(t, "900", trio.Get("RateLimit-Limit"), "what is carried over is no part of the quota, but of the capacity")
	require.Equal(t, "898", trio.Get("RateLimit-Remaining"))

	s.set(t, perPlan, "batch", ratelimit.Revision{Policy: ratelimit.PerMinute(600), Unit: "tokens"})
	require.Equal(t, `"perPlan";q=600;w=60;qu="tokens"`, fields(httplimit.DraftHeaders, "eve", "batch").Get("RateLimit-Policy"))
}
