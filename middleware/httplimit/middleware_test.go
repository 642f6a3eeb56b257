package httplimit_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/netip"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func TestWhenAndSkip(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handler := b.limited(t, httplimit.Config{
		Limits: []httplimit.Limit{
			{Limit: perUser, Key: user, When: func(r *http.Request) bool { return r.Method == http.MethodPost }},
			{Limit: perPlan, Key: user, When: func(r *http.Request) bool { return r.Method == http.MethodGet }},
		},
		Skip: func(r *http.Request) bool { return r.URL.Path == "/healthz" },
	}, inline(func(e exchange) { require.Equal(t, e.r.URL.Path != "/healthz", e.admission != nil) }))
	with := func(method, path string) *http.Request {
		r := request(t)
		r.Method, r.URL.Path = method, path
		return r
	}
	post := do(handler, with(http.MethodPost, "/"))
	require.Equal(t, `"perUser";q=3;w=60`, post.Header().Get("RateLimit-Policy"))
	require.Equal(t, `"perPlan";q=100;w=3600`, do(handler, with(http.MethodGet, "/")).Header().Get("RateLimit-Policy"))
	require.Empty(t, do(handler, with(http.MethodPut, "/")).Header(), "no rule applies")
	require.Empty(t, do(handler, with(http.MethodPost, "/healthz")).Header())
	require.Equal(t, 1.0, b.charged(t, perUser.For("ada")))
	require.Equal(t, 1.0, b.charged(t, perPlan.For("ada")))
	require.Equal(t, []string{"allowed perUser", "allowed perPlan"}, b.told.results())
}

func mustNotRun(t *testing.T) http.Handler {
	t.Helper()
	return http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("the handler ran") })
}

// TestJitterIsConstantForAKeyAndOnlyAdds promises that a refused caller waits a little longer than necessary: always
// the same time, and not the same as other callers. Requests of Config.Requests are spread in the same way.
func TestJitterIsConstantForAKeyAndOnlyAdds(t *testing.T) {
	t.Parallel()
	hourly := ratelimit.Define("hourly", ratelimit.PerHour(1))
	for _, config := range []httplimit.Config{
		limits(httplimit.Limit{Limit: hourly, Key: user}),
		{Requests: func(r *http.Request) ([]ratelimit.Request, error) {
			return []ratelimit.Request{hourly.For(r.Header.Get("X-User"))}, nil
		}},
	} {
		config.RetryJitter = 0.5
		handler, waits := setup(t).limited(t, config, respond()), make(map[string]int)
		for _, name := range []string{"ada", "bob", "cyd", "dan", "eve"} {
			require.Equal(t, http.StatusOK, do(handler, request(t, "X-User", name)).Code)
			first, again := do(handler, request(t, "X-User", name)), do(handler, request(t, "X-User", name))
			wait := first.Header().Get("Retry-After")
			require.Equal(t, wait, again.Header().Get("Retry-After"), "steady")
			seconds, err := time.ParseDuration(wait + "s")
			require.NoError(t, err)
			require.GreaterOrEqual(t, seconds, time.Hour)
			require.LessOrEqual(t, seconds, 90*time.Minute)
			require.Equal(t, `"hourly";r=0;t=3600`, first.Header().Get("RateLimit"))
			waits[wait]++
		}
		require.Len(t, waits, 5, "different keys have different places")
	}
}

func TestNewRejectsInvalidConfig(t *testing.T) {
	t.Parallel()
	b := setup(t)
	big := ratelimit.Define("big", ratelimit.PerDay(1e6))
	for message, config := range map[string]httplimit.Config{
		"Limits has 0":   {},
		"field Route is": {Limits: []httplimit.Limit{userLimit}, Route: "/\xff"},
		"field Route":    {Limits: []httplimit.Limit{userLimit}, Route: strings.Repeat("r", 201)},
		"it needs a Limit, made with ratelimit.Define": limits(httplimit.Limit{Key: user}),
		"and not both":            limits(httplimit.Limit{Limit: perUser, Key: user, Global: true}),
		"says who pays":           limits(httplimit.Limit{Limit: perUser}),
		`has the limit "perUser"`: limits(userLimit, httplimit.Limit{Limit: perUser, Global: true}),
		"Capacity None":           limits(httplimit.Limit{Limit: ratelimit.Define("none", ratelimit.TokenBucket{Rate: 1, Period: time.Hour, Capacity: ratelimit.None}), Key: user}),
		"Limits[0] (perUser): its Cost is 4, and the limit never holds more than 3; lower the cost or raise the capacity": limits(httplimit.Limit{Limit: perUser, Key: user, Cost: httplimit.FixedCost(4)}),
		"its StatedCost.Min is 4":               limits(httplimit.Limit{Limit: perUser, Key: user, Cost: httplimit.StatedCost{Header: "X", Min: 4}}),
		"its StatedCost.Default is 5":           limits(httplimit.Limit{Limit: perUser, Key: user, Cost: httplimit.StatedCost{Header: "X", Default: 5}}),
		"its Cost is 1e-10, which is too small": limits(httplimit.Limit{Limit: perUser, Key: user, Cost: httplimit.FixedCost(1e-10)}),
		"its Cost is 1e-08, which is too small": limits(httplimit.Limit{Limit: big, Key: user, Cost: httplimit.FixedCost(1e-8)}),
		"its Cost is 1, and":                    limits(httplimit.Limit{Limit: ratelimit.Define("half", ratelimit.PerDay(0.5)), Key: user}),
		"Cost is -1":                            limits(httplimit.Limit{Limit: perUser, Key: user, Cost: httplimit.FixedCost(-1)}),
		"Cost is NaN":                           limits(httplimit.Limit{Limit: perUser, Key: user, Cost: httplimit.FixedCost(math.NaN())}),
		"nil CostFunc":                          limits(httplimit.Limit{Limit: perUser, Key: user, Cost: httplimit.CostFunc(nil)}),
		"name of a Header":                      limits(httplimit.Limit{Limit: perUser, Key: user, Cost: httplimit.StatedCost{}}),
		"in this order":                         limits(httplimit.Limit{Limit: perUser, Key: user, Cost: httplimit.StatedCost{Header: "X", Min: 4, Max: 2}}),
		"Unit is":                               limits(httplimit.Limit{Limit: perUser, Key: user, Unit: "Tokens!"}),
		"Headers is 9":                          {Limits: []httplimit.Limit{userLimit}, Headers: 9},
		"RetryJitter is 0.6":                    {Limits: []httplimit.Limit{userLimit}, RetryJitter: 0.6},
		"leave Credit out":                      limits(httplimit.Limit{Limit: atOnce, Key: user, Credit: httplimit.CreditOn5xx}),
		"slots are whole":                       limits(httplimit.Limit{Limit: atOnce, Key: user, Cost: httplimit.FixedCost(1.5)}),
		"never holds more than 2":               limits(httplimit.Limit{Limit: atOnce, Key: user, Cost: httplimit.FixedCost(3)}),
		"DecisionTimeout is -1s":                {Limits: []httplimit.Limit{userLimit}, DecisionTimeout: -time.Second},
	} {
		_, err := httplimit.New(b.limiter, config)
		require.ErrorIs(t, err, ratelimit.ErrInvalidConfig, message)
		require.ErrorContains(t, err, message)
	}
	for _, unusable := range []*ratelimit.Limiter{nil, b.limiter.WithTx(nil)} {
		_, err := httplimit.New(unusable, limits(userLimit))
		require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
		require.ErrorContains(t, err, "pass what ratelimit.New returned")
	}
}

// TestALimitInShadowRefusesNothing promises that a limit in shadow mode takes as if it were enforced, that its refusal
// is counted while the request goes on, and that the client does not see it. The Observer receives the route in each
// Answered, and Config.Refused in each Refusal.
func TestALimitInShadowRefusesNothing(t *testing.T) {
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
	serve := func(name string, status int) {
		w := do(handler, request(t, "X-User", name))
		require.Equal(t, status, w.Code)
		require.NotContains(t, w.Header().Get("RateLimit-Policy")+w.Header().Get("RateLimit"), "tried")
	}
	serve("ada", http.StatusOK)
	serve("bob", http.StatusOK)
	serve("ada", http.StatusTooManyRequests)
	require.Equal(t, 1.0, b.charged(t, tried.Global()))
	require.NoError(t, b.limiter.Reset(t.Context(), tried.Global()))
	serve("ada", http.StatusTooManyRequests)
	require.Zero(t, b.charged(t, tried.Global()), "a refused request is charged nothing")
	serve("", http.StatusBadRequest)
	require.Equal(t, map[string]bool{"tried POST /chat": true, "once POST /chat": false}, refused)
	require.Equal(t, []string{
		"allowed once", "allowed once", "shadow_refused tried", "refused once", "shadow_refused tried", "refused once", "bad_key once",
	}, b.told.results())
	for _, answered := range b.told.answered {
		require.Equal(t, "POST /chat", answered.Route)
	}
	require.ErrorIs(t, b.told.answered[6].Err, httplimit.ErrNoKey)
}

// crossOrigin is middleware for CORS: it answers preflights by itself.
func crossOrigin(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Access-Control-Allow-Origin", "https://app.example")
		if httplimit.IsPreflight(r) {
			w.WriteHeader(http.StatusNoContent)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// TestPreflights promises that a preflight is neither counted nor refused with CORS around the limits, nor with Skip in
// the other order. The documentation names every field of a response, for Access-Control-Expose-Headers.
func TestPreflights(t *testing.T) {
	t.Parallel()
	b := setup(t)
	text, err := os.ReadFile("doc.go")
	require.NoError(t, err)
	named := strings.ToLower(string(regexp.MustCompile(`Access-Control-Expose-Headers: (.*)`).Find(text)))
	preflight := request(t, "Origin", "https://app.example", "Access-Control-Request-Method", "POST")
	preflight.Method = http.MethodOptions
	preflight.Header.Del("X-User")
	around := crossOrigin(b.limited(t, limits(userLimit), respond()))
	for range 4 {
		w := do(around, preflight)
		require.Equal(t, http.StatusNoContent, w.Code)
		requireNoFields(t, w.Header())
		w = do(around, request(t))
		require.NotEmpty(t, w.Header().Get("Access-Control-Allow-Origin"), "also of a refusal, or the page could not read it")
		for name := range w.Header() {
			if strings.HasPrefix(name, "Ratelimit") || name == "Retry-After" {
				require.Contains(t, named, strings.ToLower(name))
			}
		}
	}
	require.Equal(t, []string{"allowed perUser", "allowed perUser", "allowed perUser", "refused perUser"}, b.told.results())

	config := limits(userLimit)
	require.Equal(t, http.StatusBadRequest, do(b.limited(t, config, crossOrigin(respond())), preflight).Code, "a preflight has no key")
	config.Skip = httplimit.IsPreflight
	inside := b.limited(t, config, crossOrigin(respond()))
	require.Equal(t, http.StatusNoContent, do(inside, preflight).Code)
	plain := request(t)
	plain.Method = http.MethodOptions
	require.NotEmpty(t, do(inside, plain).Header().Get("RateLimit"), "an OPTIONS that is no preflight is counted")
}

func TestStatedCost(t *testing.T) {
	t.Parallel()
	clamped := httplimit.StatedCost{Header: "X-Tokens", Min: 2, Default: 5, Max: 100}
	for want, all := range map[float64][][]string{
		5:   {nil, {""}, {"many"}, {"NaN"}, {"12 34"}, {"1,000"}},
		7:   {{"7"}, {"x", "7"}},
		7.5: {{" 7.5 "}},
		2:   {{"2"}, {"1"}, {"0"}, {"-3"}, {"-Inf"}},
		100: {{"100"}, {"101"}, {"1e300"}, {"1e999"}, {"Inf"}},
		9:   {{"7", "9", "x"}}, // the greatest
	} {
		for _, stated := range all {
			r := request(t)
			r.Header["X-Tokens"] = stated
			cost, err := clamped.Of(r)
			require.NoError(t, err, stated)
			require.Equal(t, want, cost, stated)
		}
	}
	cost, err := httplimit.StatedCost{Header: "X-Tokens"}.Of(request(t))
	require.NoError(t, err)
	require.Equal(t, 1.0, cost, "the zero StatedCost's default")
}

// TestKeysAndCosts promises the answer for each key and each cost, also where the store may fail open, and the charge.
// Neither the answer nor the log has a text of the client, and only failures that are not the client's fault are in the
// log.
func TestKeysAndCosts(t *testing.T) {
	t.Parallel()
	fn := func(cost float64, err error) httplimit.Cost {
		return httplimit.CostFunc(func(*http.Request) (float64, error) { return cost, err })
	}
	fails := func(err error) httplimit.Key { return func(*http.Request) (string, error) { return "", err } }
	header := httplimit.StatedCost{Header: "X-Tokens", Default: 3}
	for name, c := range map[string]struct {
		key     httplimit.Key
		cost    httplimit.Cost
		stated  string
		status  int
		reason  string
		charged float64
		result  string
	}{
		"Default":       {user, nil, "", 200, "", 1, "allowed"},
		"Fixed":         {user, httplimit.FixedCost(4), "", 200, "", 4, "allowed"},
		"Free":          {user, httplimit.FixedCost(0), "", 200, "", 0, "allowed"},
		"Fraction":      {user, httplimit.FixedCost(0.25), "", 200, "", 0.25, "allowed"},
		"Header":        {user, header, "7", 200, "", 7, "allowed"},
		"HeaderAbsent":  {user, header, "", 200, "", 3, "allowed"},
		"AboveCapacity": {user, header, "101", 413, "too-costly", 0, "too_costly"},
		"Func":          {user, fn(5, nil), "", 200, "", 5, "allowed"},
		"FuncRejects":   {user, fn(5, ratelimit.ErrInvalidCost), "", 400, "bad-cost", 0, "bad_cost"},
		"FuncFails":     {user, fn(5, errors.New("unreadable")), "", 503, "not-decided", 0, "failed_closed"},
		"TooLarge":      {user, fn(math.Inf(1), nil), "", 413, "too-costly", 0, "too_costly"},
		"NoKey":         {fails(httplimit.ErrNoKey), nil, "", 400, "bad-key", 0, "bad_key"},
		"EmptyKey":      {fails(nil), nil, "", 400, "bad-key", 0, "bad_key"},
		"BadKey":        {fails(fmt.Errorf("%w: hunter2", httplimit.ErrBadKey)), nil, "", 400, "bad-key", 0, "bad_key"},
		"KeyFails":      {fails(errors.New("unreadable: postgres://site:hunter2@db/x")), nil, "", 503, "not-decided", 0, "failed_closed"},
	} {
		for _, open := range []bool{false, true} {
			b := setup(t)
			handler := mustNotRun(t)
			if c.status == http.StatusOK {
				handler = respond()
			}
			config := httplimit.Config{Limits: []httplimit.Limit{{Limit: perPlan, Key: c.key, Cost: c.cost}}, FailOpen: open}
			w := do(b.limited(t, config, handler), request(t, "X-Tokens", c.stated))
			require.Equal(t, c.status, w.Code, name)
			require.Equal(t, c.reason, w.Header().Get("RateLimit-Reason"), name)
			require.Equal(t, c.status != 200, w.Header().Get("Cache-Control") == "no-store", name)
			require.Equal(t, c.status == 503, w.Header().Get("Retry-After") != "", "where a wait may help")
			require.Equal(t, c.charged, b.charged(t, perPlan.For("ada")), name)
			require.Equal(t, []string{c.result + " perPlan"}, b.told.results(), name)
			require.Equal(t, c.status == 503, strings.Contains(b.log.String(), "unreadable"), name)
			require.Equal(t, c.status == 503, b.log.String() != "", name)
			require.NotContains(t, w.Body.String()+b.log.String(), "hunter2", name)
		}
	}
}

// TestNestedMiddlewaresThatCountTwiceSaySo promises one line for a bucket that two middlewares take from, and none for
// other buckets.
func TestNestedMiddlewaresThatCountTwiceSaySo(t *testing.T) {
	t.Parallel()
	slots := ratelimit.Define("slots", ratelimit.Concurrency{Slots: 9})
	global := limits(httplimit.Limit{Limit: everyone, Global: true})
	given := func(requests ...ratelimit.Request) httplimit.Config {
		return httplimit.Config{Requests: func(*http.Request) ([]ratelimit.Request, error) { return requests, nil }}
	}
	for name, c := range map[string]struct {
		outer, inner httplimit.Config
		lines        int
	}{
		"Limits":          {global, global, 1},
		"Requests":        {given(everyone.Global()), given(everyone.Global()), 1},
		"Requests inside": {global, given(everyone.Global()), 1},
		"Limits inside":   {given(perUser.For("ada")), limits(userLimit), 1},
		"slots":           {given(slots.For("ada")), given(slots.For("ada")), 1},
		"a cost of 2":     {given(perUser.For("ada").Cost(2)), given(perUser.For("ada").Plan("pro")), 1},
		"other limits":    {limits(userLimit), global, 0},
		"other keys":      {given(perUser.For("ada")), given(perUser.For("bob")), 0},
		"a stored key":    {given(perUser.For("ada")), given(perUser.ForStoredKey("ada")), 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			nested := b.limited(t, c.outer, b.limited(t, limits(httplimit.Limit{Limit: perPlan, Global: true}), b.limited(t, c.inner, respond())))
			for range 3 {
				r := request(t)
				r.Header.Set("X-User", "ada")
				do(nested, r)
			}
			require.Equal(t, c.lines, strings.Count(b.log.String(), "each request counts twice"), b.log.String())
		})
	}
}

// TestPeerBehindAProxySaysSo promises one line when Peer makes the key of forwarded requests, and none for other
// sources.
func TestPeerBehindAProxySaysSo(t *testing.T) {
	t.Parallel()
	any4, any6 := netip.MustParsePrefix("128.0.0.0/1"), netip.MustParsePrefix("0.0.0.0/1")
	behind := httplimit.Proxies{Trusted: []netip.Prefix{any4, any6}}
	peer := httplimit.ClientIP(httplimit.Peer, httplimit.Bits{})
	for name, c := range map[string]struct {
		key   httplimit.Key
		field string
		lines int
	}{
		"Peer":              {peer, "X-Forwarded-For", 1},
		"Peer, Forwarded":   {peer, "Forwarded", 1},
		"Peer in a Join":    {httplimit.Join(user, peer), "X-Forwarded-For", 1},
		"Peer, no proxy":    {peer, "X-Other", 0},
		"Peer is not asked": {httplimit.FirstOf(user, peer), "X-Forwarded-For", 0},
		"XForwardedFor":     {httplimit.ClientIP(httplimit.XForwardedFor(behind), httplimit.Bits{}), "X-Forwarded-For", 0},
		"no trusted proxy": {
			httplimit.ClientIP(httplimit.XForwardedFor(httplimit.Proxies{Trusted: []netip.Prefix{netip.MustParsePrefix("10.9.9.9/32")}}), httplimit.Bits{}),
			"X-Forwarded-For", 0,
		},
		"TrustedHeader": {httplimit.ClientIP(httplimit.TrustedHeader("X-Real-IP", any4, any6), httplimit.Bits{}), "X-Forwarded-For", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			handler := b.limited(t, limits(httplimit.Limit{Limit: everyone, Key: c.key}), respond())
			for range 3 {
				r := request(t)
				r.Header.Set("X-User", "ada")
				r.Header.Set(c.field, "203.0.113.7")
				require.NotEqual(t, http.StatusServiceUnavailable, do(handler, r).Code)
			}
			require.Equal(t, c.lines, strings.Count(b.log.String(), "has the key of its peer"), b.log.String())
		})
	}
}
