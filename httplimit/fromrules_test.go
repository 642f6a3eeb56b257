package httplimit_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	tables "github.com/pgratelimit/pgratelimit/rules"
)

// signedIn says what the requests of these tests are: their headers are what a site has verified.
func signedIn(r *http.Request) (tables.Attributes, error) {
	return tables.Attributes{
		User: r.Header.Get("X-User"), Plan: r.Header.Get("X-Plan"), Address: r.Header.Get("X-Address"), Route: r.Pattern,
		More: map[string]string{"header:x-api-key": r.Header.Get("X-Api-Key"), "jwt:plan": r.Header.Get("X-Plan")},
	}, nil
}

// siteOf returns a handler that is limited by a file of package rules.
func siteOf(t *testing.T, file string) http.Handler {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "rules", "testdata", "seeds", file))
	require.NoError(t, err)
	document, err := tables.Convert(bytes.NewReader(text))
	require.NoError(t, err)
	set, err := tables.SetOf(*document)
	require.NoError(t, err)
	site, err := tables.NewSite(set, tables.SiteConfig{Attributes: []string{"header:x-api-key", "jwt:plan"}})
	require.NoError(t, err)
	b := setup(t)
	b.policies = set
	b.limiter = b.on(t, b.db)
	mux := http.NewServeMux()
	limited := b.limited(t, httplimit.Config{Requests: httplimit.FromRules(site, signedIn)}, respond())
	mux.Handle("GET /api/search", limited)
	mux.Handle("GET /api/items", limited)
	return mux
}

// said returns the answer to a GET: the status, and who refused.
func said(t *testing.T, handler http.Handler, path string, headers ...string) string {
	t.Helper()
	r := request(t, append([]string{"X-User", ""}, headers...)...)
	r.URL.Path = path
	w := do(handler, r)
	var problem struct {
		Tiers  []string `json:"violated-policies"`
		Rules  []string `json:"violated-rules"`
		Detail string   `json:"detail"`
	}
	switch err := json.Unmarshal(w.Body.Bytes(), &problem); {
	case w.Code == http.StatusOK:
		return "200"
	case err == nil && len(problem.Rules) > 0:
		return fmt.Sprintf("%d by the tier %s, rule %s", w.Code, strings.Join(problem.Tiers, "+"), strings.Join(problem.Rules, "+"))
	default:
		return fmt.Sprint(w.Code, " ", problem.Detail)
	}
}

// TestFromRules promises that the tiers of an example file see the user, plan, route, API key and cost of a request.
// steps are requests, each allowed so many times and then refused.
func TestFromRules(t *testing.T) {
	t.Parallel()
	type step struct {
		path    string
		headers []string
		allowed int
		then    string
	}
	const items, search = "/api/items", "/api/search"
	ada, bob := []string{"X-User", "ada", "X-Plan", "free"}, []string{"X-User", "bob", "X-Plan", "pro"}
	for name, c := range map[string]struct {
		file  string
		steps []step
	}{
		"ByUser": {"rows.yaml", []step{
			{items, ada, 50, "429 by the tier user, rule user, plan free"},
			{items, bob, 51, "200"},
			{search, bob, 51, "200"},
		}},
		"ByKey": {"tiers.json", []step{
			{items, []string{"X-Api-Key", "k-1"}, 20, "429 by the tier free, rule free"},
			{items, []string{"X-Api-Key", "k-2", "X-Plan", "enterprise"}, 21, "200"},
			{items, []string{"X-Plan", "enterprise"}, 0, "400 the request does not say who it is from"},
		}},
		"AtACost": {"variablecost.json", []step{
			{items, []string{"X-Request-Weight", "500"}, 1, "200"},
			{items, nil, 0, "429 by the tier default, rule default"},
			{items, []string{"X-Request-Weight", "1001"}, 0, "413 the request costs more than can be had at once"},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			handler := siteOf(t, c.file)
			for _, s := range c.steps {
				for i := range s.allowed {
					require.Equal(t, "200", said(t, handler, s.path, s.headers...), "request %d", i+1)
				}
				answer := said(t, handler, s.path, s.headers...)
				require.True(t, strings.HasPrefix(answer, s.then), answer)
			}
		})
	}
}

// A request that matches no tier is refused, unless the program allows it.
func TestFromRulesWithoutTier(t *testing.T) {
	t.Parallel()
	set, err := tables.SetOf(tables.Document{
		Rules: []tables.Rule{{Limit: "global", Policy: ratelimit.PerSecond(1)}},
		Tiers: tables.TierSet{Tiers: []tables.Tier{{Limit: "global", Route: "/api/search"}}},
	})
	require.NoError(t, err)
	site, err := tables.NewSite(set, tables.SiteConfig{})
	require.NoError(t, err)
	fromRules, b, r := httplimit.FromRules(site, signedIn), setup(t), request(t)
	r.Pattern = "/api/items"
	require.Equal(t, http.StatusServiceUnavailable, do(b.limited(t, limitsAnd(fromRules), mustNotRun(t)), r).Code)
	open := limitsAnd(func(r *http.Request) ([]ratelimit.Request, error) {
		requests, err := fromRules(r)
		if errors.Is(err, tables.ErrNoTier) {
			return nil, nil
		}
		return requests, err
	})
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

func TestRequestsThatCannotBeAsked(t *testing.T) {
	t.Parallel()
	tests := []struct {
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
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			config := limitsAnd(func(*http.Request) ([]ratelimit.Request, error) { return test.requests, test.err }, userLimit)
			config.RetryJitter, config.FailOpen = 0.5, true
			require.Equal(t, test.want, do(b.limited(t, config, respond()), request(t)).Code)
			require.Zero(t, b.charged(t, perUser.For("ada")))
			require.Equal(t, []string{test.told}, b.told.results())

			b.told = &told{}
			b.inShadow(t, everyone)
			if strings.HasSuffix(test.told, " everyone") {
				require.Equal(t, http.StatusOK, do(b.limited(t, config, respond()), request(t)).Code)
				require.Equal(t, []string{"shadow_" + test.told, "allowed perUser"}, b.told.results())
			}
		})
	}
}
