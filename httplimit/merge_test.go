package httplimit_test

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// merging is a handler that takes what the requests cost by itself, one after the other, and merges each decision.
func (b *bundle) merging(t *testing.T, requests ...ratelimit.Request) http.Handler {
	t.Helper()
	return inline(func(e exchange) {
		for _, request := range requests {
			d, err := b.limiter.Take(e.r.Context(), request)
			require.NoError(t, err)
			httplimit.Merge(e.w, e.r, d)
		}
	})
}

// TestAHandlersDecisionIsStatedBesideTheMiddlewares is a handler that takes by itself behind two middlewares.
func TestAHandlersDecisionIsStatedBesideTheMiddlewares(t *testing.T) {
	t.Parallel()
	b := setup(t)
	behind := func(handler http.Handler) http.Handler {
		return b.limited(t, limits(httplimit.Limit{Limit: everyone, Global: true}), b.limited(t, limits(userLimit), handler))
	}
	w := do(behind(b.merging(t, sendMessage.For("ada"), rpm.For("ada"))), request(t))
	require.Equal(t, `"everyone";q=1000;w=86400, "perUser";q=3;w=60, "sendMessage";q=10;w=60, "rpm";q=60;w=60`, w.Header().Get("RateLimit-Policy"))
	require.Equal(t, `"everyone";r=999;t=86314, "perUser";r=2;t=40, "sendMessage";r=2;t=12, "rpm";r=59;t=59`, w.Header().Get("RateLimit"))
	require.Empty(t, w.Header().Get("Retry-After"))

	b.take(t, sendMessage.For("ada").Cost(2))
	w = do(behind(b.merging(t, sendMessage.For("ada"))), request(t))
	require.Equal(t, `"everyone";q=1000;w=86400, "perUser";q=3;w=60, "sendMessage";q=10;w=60`, w.Header().Get("RateLimit-Policy"))
	require.Equal(t, `"sendMessage";r=0;t=6`, w.Header().Get("RateLimit"), "only what refused is stated")
	require.Equal(t, "6", w.Header().Get("Retry-After"))
}

// TestOfTwoStatementsOnALimitTheTighterStands has a middleware and a handler ask one name: for another key, another policy, a larger
// cost.
func TestOfTwoStatementsOnALimitTheTighterStands(t *testing.T) {
	t.Parallel()
	free := ratelimit.Define("perUser", ratelimit.PerMinute(2))
	for name, c := range map[string]struct {
		own           ratelimit.Request
		policy, limit string
	}{
		"Looser":        {perUser.For("bob").Cost(0), `"perUser";q=3;w=60`, `"perUser";r=2;t=40`},
		"Tighter":       {perUser.For("bob").Cost(1.5), `"perUser";q=3;w=60`, `"perUser";r=1;t=20`},
		"AnotherPolicy": {free.For("bob"), `"perUser";q=2;w=60`, `"perUser";r=1;t=30`},
		"TheSameBucket": {perUser.For("ada"), `"perUser";q=3;w=60`, `"perUser";r=1;t=20`},
		"RefusedThere":  {perUser.For("ada").Cost(3), `"perUser";q=3;w=60`, `"perUser";r=2;t=20`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			unit := userLimit
			unit.Unit = "messages"
			w := do(b.limited(t, limits(unit), b.merging(t, c.own)), request(t))
			require.Equal(t, c.policy+`;qu="messages"`, w.Header().Get("RateLimit-Policy"), "and the unit stays")
			require.Equal(t, c.limit, w.Header().Get("RateLimit"))
		})
	}
}

// TestMergeStatesInTheFormOfTheMiddleware promises the tightest state in a form that reports only one limit, from the middleware or
// the handler.
func TestMergeStatesInTheFormOfTheMiddleware(t *testing.T) {
	t.Parallel()
	b := setup(t)
	config := httplimit.Config{Headers: httplimit.Draft06Headers, Limits: []httplimit.Limit{userLimit}}
	stated := func(own ratelimit.Request) (all []string) {
		header := do(b.limited(t, config, b.merging(t, own)), request(t)).Header()
		for _, name := range []string{"RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset"} {
			require.Len(t, header.Values(name), 1, name)
			all = append(all, header.Get(name))
		}
		require.Empty(t, header.Get("RateLimit"))
		return all
	}
	require.Equal(t, []string{"3", "2", "20"}, stated(rpm.For("ada")), "the middleware's")
	require.Equal(t, []string{"60", "0", "60"}, stated(rpm.For("ada").Cost(59)), "the handler's")

	config = httplimit.Config{Headers: httplimit.NoHeaders, Limits: []httplimit.Limit{{Limit: perPlan, Key: user}}}
	requireNoFields(t, do(b.limited(t, config, b.merging(t, rpd.For("ada"))), request(t)).Header())
}

// TestNestedMiddlewaresStateTheTightest promises that a middleware with much left does not hide the one around it that has little.
func TestNestedMiddlewaresStateTheTightest(t *testing.T) {
	t.Parallel()
	b := setup(t)
	trio := func(rule httplimit.Limit, handler http.Handler) http.Handler {
		return b.limited(t, httplimit.Config{Headers: httplimit.Draft06Headers, Limits: []httplimit.Limit{rule}}, handler)
	}
	w := do(trio(userLimit, trio(httplimit.Limit{Limit: everyone, Global: true}, respond())), request(t))
	require.Equal(t, "3", w.Header().Get("RateLimit-Limit"))
	require.Equal(t, "2", w.Header().Get("RateLimit-Remaining"))

	epoch := httplimit.Config{Headers: httplimit.EpochHeaders, Limits: []httplimit.Limit{{Limit: everyone, Global: true}}}
	w = do(trio(userLimit, b.limited(t, epoch, respond())), request(t))
	require.Equal(t, "3", w.Header().Get("RateLimit-Limit"))
	require.Equal(t, "1000", w.Header().Get("X-RateLimit-Limit"), "in another form it stands alone")
}

// TestMergeWithoutAMiddleware promises what DraftHeaders.Set does, and the longest Retry-After.
func TestMergeWithoutAMiddleware(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.take(t, perUser.For("ada").Cost(3))
	for there, want := range map[string]string{"": "20", "40": "40", "3": "20", "Mon, 09 Mar 2026 10:00:40 GMT": "20"} {
		handler := b.merging(t, perUser.For("ada"))
		w := do(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Retry-After", there)
			handler.ServeHTTP(w, r)
		}), request(t))
		require.Equal(t, want, w.Header().Get("Retry-After"))
		require.Equal(t, `"perUser";r=0;t=20`, w.Header().Get("RateLimit"))
	}
}
