package httplimit_test

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// What a call over several limits may be told of each.
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

// TestFieldsLeaveOutWhatIsNotEnforced promises that a client is told of no limit that its rule only tries or has switched off,
// and that a pause is told as having nothing until it ends.
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
		"OnlyOff":     {httplimit.TrioHeaders, decision(true, offState), map[string]string{}},
		"Paused":      {draft, decision(false, leftAlone, pausedState), map[string]string{"Ratelimit-Policy": daily, "Ratelimit": `"rpd";r=0;t=91`}},
		"PausedTrio":  {httplimit.TrioHeaders, decision(false, leftAlone, pausedState), map[string]string{"Ratelimit-Limit": "1000", "Ratelimit-Remaining": "0", "Ratelimit-Reset": "91"}},
		"ShadowTrio":  {httplimit.TrioHeaders, decision(true, triedState, allowedState), map[string]string{"Ratelimit-Limit": "60", "Ratelimit-Remaining": "59", "Ratelimit-Reset": "1"}},
		"ShadowEpoch": {httplimit.EpochHeaders, decision(true, triedState, allowedState), map[string]string{"X-Ratelimit-Limit": "60", "X-Ratelimit-Remaining": "59", "X-Ratelimit-Reset": "1773050401"}},
		"PausedOpenAI": {httplimit.OpenAIHeaders, decision(false, pausedState), map[string]string{
			"X-Ratelimit-Limit-Requests": "1000", "X-Ratelimit-Remaining-Requests": "0", "X-Ratelimit-Reset-Requests": "1m30.001s",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			header, want := http.Header{}, http.Header{}
			for field, value := range c.want {
				want.Set(field, value)
			}
			c.form.Set(header, c.decision)
			require.Equal(t, want, header)
		})
	}
}

// TestARefusalByAPauseSaysWhenItEnds promises 429 and a Retry-After until the pause's end, and that why it is paused stays
// inside.
func TestARefusalByAPauseSaysWhenItEnds(t *testing.T) {
	t.Parallel()
	refusal := httplimit.NewRefusal(decision(false, leftAlone, pausedState))
	w := httptest.NewRecorder()
	refusal.ServeHTTP(w, request(t))
	require.Equal(t, http.StatusTooManyRequests, w.Code)
	require.Equal(t, "91", w.Header().Get("Retry-After"))
	require.Equal(t, "temporary-reduced-capacity", w.Header().Get("RateLimit-Reason"))
	require.JSONEq(t, `{
		"type": "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity",
		"title": "Request cannot be satisfied due to temporary server capacity constraints",
		"status": 429, "detail": "rpd is paused; retry in 91 s", "violated-policies": ["rpd"]
	}`, w.Body.String())
	require.Equal(t, "the provider is down", refusal.Decision.States[1].PauseReason, "who answers may tell")
}

// TestARefusalNamesOnlyWhatIsEnforced promises that a limit which its rule only tries is not named as one that refused.
func TestARefusalNamesOnlyWhatIsEnforced(t *testing.T) {
	t.Parallel()
	refused := ratelimit.State{Limit: rpm, Cost: 1, Mode: ratelimit.On, RetryAfter: 2 * time.Second}
	refusal := httplimit.NewRefusal(decision(false, triedState, refused, offState))
	require.Equal(t, []string{"rpm"}, refusal.Violated)
	require.Equal(t, "rpm: 60 per minute; retry in 2 s", refusal.Detail)
	require.Equal(t, "quota-exceeded", refusal.Reason)
}
