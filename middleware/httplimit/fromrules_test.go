package httplimit_test

import (
	"errors"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	tables "github.com/pgratelimit/pgratelimit/rules"
)

// signedIn returns the attributes of a request: its headers stand for a verified session.
func signedIn(r *http.Request) (tables.Attributes, error) {
	if r.Header.Get("X-User") == "forged" {
		return tables.Attributes{}, httplimit.ErrBadKey
	}
	return tables.Attributes{User: r.Header.Get("X-User"), Plan: r.Header.Get("X-Plan"), Route: r.Pattern}, nil
}

// TestFromRules promises that tiers see the user, the plan, the route and the stated cost of a request, and the answer
// to each error.
func TestFromRules(t *testing.T) {
	t.Parallel()
	set, err := tables.SetOf(tables.Document{
		Rules: []tables.Rule{
			{Limit: "search", Policy: ratelimit.PerHour(5)},
			{Limit: "search", Plan: "pro", Policy: ratelimit.PerHour(100)},
			{Limit: "chat", Policy: ratelimit.PerHour(50)},
		},
		Tiers: tables.TierSet{Tiers: []tables.Tier{
			{Limit: "search", Key: "{user}", Route: "/search", CostSource: "query:n"}, {Limit: "chat", Route: "/chat", CostSource: "header:X-Tokens"},
		}},
	}, nil)
	require.NoError(t, err)
	site, err := tables.NewSite(set, tables.SiteConfig{})
	require.NoError(t, err)
	b := setup(t)
	b.policies = set
	b.limiter = b.on(t, b.db)
	fromRules := httplimit.FromRules(site, signedIn)
	handler := b.limited(t, limitsAnd(fromRules), respond())
	for _, step := range []struct {
		path, user, plan, tokens string
		status                   int
	}{
		{"/search?n=3", "ada", "", "", 200},
		{"/search?n=3", "ada", "", "", 429},
		{"/search?n=3", "bob", "", "", 200},
		{"/search?n=6", "cyd", "", "", 413},
		{"/search?n=6", "cyd", "pro", "", 200},
		{"/search", "", "", "", 400},
		{"/search", "forged", "", "", 400},
		{"/chat", "", "", "50", 200},
		{"/chat", "ada", "", "1", 429},
		{"/items", "ada", "", "", 503}, // no tier
	} {
		r := request(t, "X-User", step.user, "X-Plan", step.plan, "X-Tokens", step.tokens)
		r.URL, err = url.Parse(step.path)
		require.NoError(t, err)
		r.Pattern = r.URL.Path
		require.Equal(t, step.status, do(handler, r).Code, step)
	}
	open := limitsAnd(func(r *http.Request) ([]ratelimit.Request, error) {
		requests, err := fromRules(r)
		if errors.Is(err, tables.ErrNoTier) {
			return nil, nil
		}
		return requests, err
	})
	r := request(t)
	r.Pattern = "/items"
	require.Equal(t, http.StatusOK, do(b.limited(t, open, respond()), r).Code)
}

// The requests of Config.Requests are one call with the Limits, and are settled and credited in the same way.
func TestRequestsBesideLimits(t *testing.T) {
	t.Parallel()
	b := setup(t)
	config := limitsAnd(func(*http.Request) ([]ratelimit.Request, error) {
		return []ratelimit.Request{windowed.Global().Cost(4)}, nil
	}, userLimit)
	handler := b.limited(t, config, inline(func(e exchange) {
		require.Len(t, e.admission.Decision().States, 2)
		require.NoError(t, e.admission.Settle(t.Context(), 1, windowed))
		require.NoError(t, e.admission.Settle(t.Context(), 1, windowed), "once")
	}))
	require.Equal(t, http.StatusOK, do(handler, request(t)).Code)
	require.Equal(t, 1.0, b.charged(t, windowed.Global()))
	require.Equal(t, 1.0, b.charged(t, perUser.For("ada")))

	b.take(t, windowed.Global().Cost(9))
	require.Equal(t, http.StatusTooManyRequests, do(handler, request(t)).Code)
	require.Equal(t, 1.0, b.charged(t, perUser.For("ada")))
	require.Equal(t, []string{"allowed perUser", "refused windowed"}, b.told.results())
}

// rulesAnd is a configuration with both.
func limitsAnd(requests func(*http.Request) ([]ratelimit.Request, error), limits ...httplimit.Limit) httplimit.Config {
	return httplimit.Config{Limits: limits, Requests: requests}
}

func TestInvalidRequestsOfConfig(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name     string
		requests []ratelimit.Request
		err      error
		want     int
		told     string
	}{
		{"NoKey", nil, httplimit.ErrNoKey, http.StatusBadRequest, "bad_key"},
		{"InvalidKey", nil, ratelimit.ErrInvalidKey, http.StatusBadRequest, "bad_key"},
		{"AnotherError", nil, errors.New("down"), http.StatusServiceUnavailable, "failed_closed"},
		{"EmptyKey", []ratelimit.Request{everyone.For("")}, nil, http.StatusBadRequest, "bad_key everyone"},
		{"ZeroLimit", []ratelimit.Request{{}}, nil, http.StatusServiceUnavailable, "failed_closed"},
		{"OneOfLimits", []ratelimit.Request{perUser.For("bob")}, nil, http.StatusServiceUnavailable, "failed_closed perUser"},
		{"OneLimitTwice", []ratelimit.Request{everyone.For("a"), everyone.For("b")}, nil, http.StatusServiceUnavailable, "failed_closed everyone"},
	} {
		b := setup(t)
		config := limitsAnd(func(*http.Request) ([]ratelimit.Request, error) { return test.requests, test.err }, userLimit)
		config.RetryJitter, config.FailOpen = 0.5, true
		require.Equal(t, test.want, do(b.limited(t, config, respond()), request(t)).Code, test.name)
		require.Zero(t, b.charged(t, perUser.For("ada")), test.name)
		require.Equal(t, []string{test.told}, b.told.results(), test.name)

		b.told = &told{}
		b.inShadow(t, everyone)
		if strings.HasSuffix(test.told, " everyone") {
			require.Equal(t, http.StatusOK, do(b.limited(t, config, respond()), request(t)).Code, test.name)
			require.Equal(t, []string{"shadow_" + test.told, "allowed perUser"}, b.told.results(), test.name)
		}
	}
}
