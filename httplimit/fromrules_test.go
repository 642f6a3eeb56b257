package httplimit_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	tables "github.com/pgratelimit/pgratelimit/rules"
)

// tablesite is a site whose limits are all in tables, behind a server. Its clock stands still at an instant at which the stored
// rules are in effect.
type tablesite struct {
	*bundle
	store  *tables.Store
	set    *tables.Set
	config httplimit.Config
	server *httptest.Server
}

// signedIn says what the requests of these tests are: their headers are what a site has verified.
func signedIn(r *http.Request) (tables.Attributes, error) {
	return tables.Attributes{
		User: r.Header.Get("X-User"), Plan: r.Header.Get("X-Plan"), Address: r.Header.Get("X-Address"), Route: r.Pattern,
		More: map[string]string{"header:x-api-key": r.Header.Get("X-Api-Key"), "jwt:plan": r.Header.Get("X-Plan")},
	}, nil
}

// serveTables stores what a file of package rules says, and serves a site that is limited by it.
func serveTables(t *testing.T, file string, change ...func(*tablesite)) *tablesite {
	t.Helper()
	s := &tablesite{bundle: setup(t)}
	var err error
	s.store, err = tables.NewStore(s.pool, tables.StoreConfig{Lead: -1})
	require.NoError(t, err)
	s.set, err = tables.NewSet(s.pool, tables.Config{})
	require.NoError(t, err)
	text, err := os.ReadFile(filepath.Join("..", "rules", "testdata", "seeds", file))
	require.NoError(t, err)
	d, err := tables.Convert(bytes.NewReader(text))
	require.NoError(t, err)
	s.apply(t, tables.Changes{Put: d.Rules, Tiers: &d.Tiers})
	s.limiter, err = ratelimit.New(s.pool, ratelimit.Config{AsOf: s.clock, Observer: s.told, Policies: s.set})
	require.NoError(t, err)
	site, err := tables.NewSite(s.set, tables.SiteConfig{Attributes: []string{"header:x-api-key", "jwt:plan"}})
	require.NoError(t, err)
	s.config.Requests = httplimit.FromRules(site, signedIn)
	for _, change := range change {
		change(s)
	}
	mux := http.NewServeMux()
	for _, route := range []string{"GET /api/search", "GET /api/items"} {
		mux.Handle(route, s.limited(t, s.config, respond()))
	}
	s.server = serve(t, mux)
	return s
}

// apply makes changes, and lets them hold.
func (s *tablesite) apply(t *testing.T, changes tables.Changes) {
	t.Helper()
	applied, err := s.store.Apply(t.Context(), tables.Edit{Author: "ana", Reason: "a test"}, changes)
	require.NoError(t, err)
	require.NoError(t, s.set.Load(t.Context()))
	s.setClock(applied.From.Add(time.Hour))
}

// get sends a GET and says what came of it: the status, and who refused.
func (s *tablesite) get(t *testing.T, path string, headers ...string) string {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.server.URL+path, http.NoBody)
	require.NoError(t, err)
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	response, err := s.server.Client().Do(r)
	require.NoError(t, err)
	defer response.Body.Close()
	said := fmt.Sprint(response.StatusCode)
	if response.StatusCode == http.StatusOK {
		return said
	}
	var problem struct {
		Tiers  []string `json:"violated-policies"`
		Rules  []string `json:"violated-rules"`
		Detail string   `json:"detail"`
	}
	require.NoError(t, json.NewDecoder(response.Body).Decode(&problem))
	if len(problem.Tiers) == 0 {
		return said + " " + problem.Detail
	}
	return fmt.Sprintf("%s by the tier %s, rule %s, wait %s", said,
		strings.Join(problem.Tiers, "+"), strings.Join(problem.Rules, "+"), response.Header.Get("Retry-After"))
}

// allowed sends so many GETs, all of which have to pass.
func (s *tablesite) allowed(t *testing.T, n int, path string, headers ...string) {
	t.Helper()
	for i := range n {
		require.Equal(t, "200", s.get(t, path, headers...), "request %d", i+1)
	}
}

// inTables is the limit that the tables have the policy of.
func inTables(name string) ratelimit.Limit { return ratelimit.Define(name, ratelimit.PerSecond(1)) }

// left returns what a bucket holds.
func (s *tablesite) left(t *testing.T, request ratelimit.Request) float64 {
	t.Helper()
	v, err := s.limiter.Value(t.Context(), request)
	require.NoError(t, err)
	return v.Tokens
}

// The four example rules of the low-level design page.
func TestFromRulesOfUserRouteAndAll(t *testing.T) {
	t.Parallel()
	s := serveTables(t, "rows.yaml")
	ada, bob, eve := []string{"X-User", "ada", "X-Plan", "free"}, []string{"X-User", "bob", "X-Plan", "pro"}, []string{"X-User", "eve", "X-Plan", "enterprise"}
	bobs, searches, all := inTables("user").For("user:bob").Plan("pro"), inTables("endpoint:/api/search").Global(), inTables("global").Global()

	s.allowed(t, 50, "/api/items", ada...)
	require.Equal(t, "429 by the tier user, rule user, plan free, wait 1", s.get(t, "/api/items", ada...))
	require.Equal(t, 100_000.0-50, s.left(t, all), "a refused request takes nothing from the other tiers")
	s.allowed(t, 51, "/api/items", bob...)
	require.Equal(t, 500.0-51, s.left(t, bobs))
	require.Equal(t, 100_000.0-101, s.left(t, all))
	require.Equal(t, 2000.0, s.left(t, searches), "nobody has searched")

	s.take(t, searches.Cost(1999))
	s.allowed(t, 1, "/api/search", bob...)
	require.Equal(t, "429 by the tier endpoint:/api/search, rule endpoint:/api/search, wait 1", s.get(t, "/api/search?page=2", bob...))
	require.Equal(t, 500.0-52, s.left(t, bobs))
	require.Equal(t, 100_000.0-102, s.left(t, all))
	s.allowed(t, 1, "/api/items", bob...)

	s.take(t, all.Cost(s.left(t, all)-1))
	s.allowed(t, 1, "/api/items", eve...)
	require.Equal(t, "429 by the tier global, rule global, wait 1", s.get(t, "/api/items", eve...))
	require.Equal(t, "429 by the tier user+global, rule user, plan free+global, wait 1", s.get(t, "/api/items", ada...))
	require.Equal(t, 500.0-53, s.left(t, bobs))
}

// If a user changes plans, the usage so far carries over.
func TestFromRulesKeepsOneBucketForAllPlans(t *testing.T) {
	t.Parallel()
	s := serveTables(t, "rows.json")
	s.allowed(t, 50, "/api/items", "X-User", "ada", "X-Plan", "free")
	require.Equal(t, "429 by the tier user, rule user, plan pro, wait 1", s.get(t, "/api/items", "X-User", "ada", "X-Plan", "pro"))
	s.setClock(s.clock().Add(time.Second))
	s.allowed(t, 10, "/api/items", "X-User", "ada", "X-Plan", "pro")

	s.apply(t, tables.Changes{Put: []tables.Rule{{Limit: "user", Plan: "free", Policy: ratelimit.TokenBucket{Rate: 1, Period: time.Hour, Capacity: 3}}}})
	s.allowed(t, 3, "/api/items", "X-User", "new", "X-Plan", "free")
	require.Equal(t, "429 by the tier user, rule user, plan free, wait 3600", s.get(t, "/api/items", "X-User", "new", "X-Plan", "free"))
}

// The tiers by API key of the page on the token bucket.
func TestFromRulesOfTiersByKey(t *testing.T) {
	t.Parallel()
	s := serveTables(t, "tiers.json")
	free, enterprise := []string{"X-Api-Key", "k-1"}, []string{"X-Api-Key", "k-2", "X-Plan", "enterprise"}
	s.allowed(t, 20, "/api/items", free...)
	require.Equal(t, "429 by the tier free, rule free, wait 1", s.get(t, "/api/items", free...))
	s.allowed(t, 21, "/api/items", enterprise...)
	s.take(t, inTables("enterprise").For("k-2").Cost(2000-22))
	s.allowed(t, 1, "/api/items", enterprise...)
	require.Equal(t, "429 by the tier enterprise, rule enterprise, wait 1", s.get(t, "/api/items", enterprise...))
	require.Equal(t, 20.0, s.left(t, inTables("free").For("k-2")), "the first tier that fits is asked, and no other")
	require.Equal(t, "400 the request does not say who it is from", s.get(t, "/api/items", "X-Plan", "enterprise"))
}

// The limit by address, and the cost from a header, of the same page.
func TestFromRulesOfAddressAndCost(t *testing.T) {
	t.Parallel()
	s := serveTables(t, "globalrps.json")
	s.allowed(t, 10, "/api/items", "X-Address", "203.0.113.7")
	require.Equal(t, "429 by the tier global-rps, rule global-rps, wait 1", s.get(t, "/api/items", "X-Address", "203.0.113.7"))
	s.allowed(t, 1, "/api/items", "X-Address", "2001:db8::1")

	s = serveTables(t, "variablecost.json")
	left := 1000.0
	for weight, cost := range map[string]float64{"": 1, "5": 5, "2.5": 2.5, "many": 1, "-3": 1, "0.001": 1} {
		s.allowed(t, 1, "/api/items", "X-Request-Weight", weight)
		left -= cost
		require.Equal(t, left, s.left(t, inTables("default").Global()), weight)
	}
	require.Equal(t, "429 by the tier default, rule default, wait 1", s.get(t, "/api/items", "X-Request-Weight", "1000"))
	require.Equal(t, "413 the request costs more than can be had at once", s.get(t, "/api/items", "X-Request-Weight", "1001"))
	require.Equal(t, left, s.left(t, inTables("default").Global()))
}

// A request that matches no tier is refused, unless the program allows it.
func TestFromRulesWithoutTier(t *testing.T) {
	t.Parallel()
	onlySearch := tables.Changes{Tiers: &tables.TierSet{Tiers: []tables.Tier{{Limit: "global", Route: "/api/search"}}}}
	s := serveTables(t, "rows.yaml", func(s *tablesite) { s.apply(t, onlySearch) })
	s.allowed(t, 1, "/api/search")
	require.Equal(t, "503 rate limits cannot be checked; retry in 1 s", s.get(t, "/api/items"))

	s = serveTables(t, "rows.yaml", func(s *tablesite) {
		s.apply(t, onlySearch)
		all := s.config.Requests
		s.config.Requests = func(r *http.Request) ([]ratelimit.Request, error) {
			requests, err := all(r)
			if errors.Is(err, tables.ErrNoTier) {
				return nil, nil
			}
			return requests, err
		}
	})
	s.allowed(t, 1, "/api/items")
	require.Equal(t, 100_000.0, s.left(t, inTables("global").Global()))
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

// A refused caller waits a little longer than necessary: always the same time, and not the same as other callers.
func TestRequestsAreSpread(t *testing.T) {
	t.Parallel()
	b := setup(t)
	config := limitsAnd(func(r *http.Request) ([]ratelimit.Request, error) {
		return []ratelimit.Request{perPlan.For(r.Header.Get("X-User")).Cost(100)}, nil
	})
	config.RetryJitter = 0.5
	handler := b.limited(t, config, respond())
	waits := map[string]bool{}
	for _, name := range []string{"ada", "bob", "eve"} {
		require.Equal(t, http.StatusOK, do(handler, request(t, "X-User", name)).Code)
		first := do(handler, request(t, "X-User", name)).Header().Get("Retry-After")
		require.Equal(t, first, do(handler, request(t, "X-User", name)).Header().Get("Retry-After"))
		waits[first] = true
	}
	require.Len(t, waits, 3)
}

func TestFromRulesPanicsWithout(t *testing.T) {
	t.Parallel()
	require.Panics(t, func() { httplimit.FromRules(nil, signedIn) })
}
