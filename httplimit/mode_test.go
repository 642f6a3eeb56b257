package httplimit_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// States of limits in a call over several limits.
var (
	allowedState = ratelimit.State{Limit: rpm, Cost: 1, Allowed: true, Mode: ratelimit.On, Remaining: 59, ResetAfter: time.Second}
	triedState   = ratelimit.State{Limit: rpd, Cost: 1, Mode: ratelimit.Shadow, RetryAfter: time.Hour}
	offState     = ratelimit.State{Limit: rpd, Cost: 1, Allowed: true, Mode: ratelimit.Off, NotAsked: true}
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

// TestFieldsLeaveOutWhatIsNotEnforced promises no field for a limit in shadow mode or off, and 0 remaining tokens for a paused
// limit until its pause ends.
func TestFieldsLeaveOutWhatIsNotEnforced(t *testing.T) {
	t.Parallel()
	const (
		draft  = httplimit.DraftHeaders
		policy = `"rpm";q=60;w=60`
		daily  = `"rpd";q=1000;w=86400`
	)
	for name, c := range map[string]struct {
		form     httplimit.Headers
		decision ratelimit.Decision
		want     map[string]string
	}{
		"Shadow":      {draft, decision(true, triedState, allowedState), map[string]string{"Ratelimit-Policy": policy, "Ratelimit": `"rpm";r=59;t=59`}},
		"Off":         {draft, decision(true, offState, allowedState), map[string]string{"Ratelimit-Policy": policy, "Ratelimit": `"rpm";r=59;t=59`}},
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
}

// TestARefusalNamesOnlyWhatIsEnforced promises that a refusal does not name a limit in shadow mode.
func TestARefusalNamesOnlyWhatIsEnforced(t *testing.T) {
	t.Parallel()
	refused := ratelimit.State{Limit: rpm, Cost: 1, Mode: ratelimit.On, RetryAfter: 2 * time.Second}
	refusal := httplimit.NewRefusal(decision(false, triedState, refused, offState))
	require.Equal(t, []string{"rpm"}, refusal.Violated)
	require.Equal(t, "rpm: 60 per minute; retry in 2 s", refusal.Detail)
	require.Equal(t, "quota-exceeded", refusal.Reason)
}

// mode is an era that keeps the code's policy.
func mode(m ratelimit.Mode) ratelimit.Era { return ratelimit.Era{Mode: m} }

// TestALimitThatIsOffIsNotInTheWay promises that a limit whose rule is off allows a request of any cost, takes nothing and is in no
// field.
func TestALimitThatIsOffIsNotInTheWay(t *testing.T) {
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

// TestOnlyWhatIsEnforcedCostsTooMuch promises that a 413 names the limit that is in the way, and none that holds as little but
// is off or only tried.
func TestOnlyWhatIsEnforcedCostsTooMuch(t *testing.T) {
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

// TestAPausedLimitAnswers429UntilThePauseEnds promises that a pause refuses all requests, takes nothing from the other limits, and
// ends by itself. The answer says when, but not why.
func TestAPausedLimitAnswers429UntilThePauseEnds(t *testing.T) {
	t.Parallel()
	b, s := setupStored(t)
	s.set(t, perUser, "", of(ratelimit.PerMinute(3)))
	rule := s.RulingFor(perUser, "", "").Paused(ten.Add(90*time.Second+time.Microsecond), "the provider is down")
	s.rules.Store(storedKey{"perUser", ""}, rule)
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
