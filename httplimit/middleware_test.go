package httplimit_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func TestRulesAreAllOrNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handler := b.limited(t, limits(
		httplimit.Limit{Limit: everyone, Global: true},
		userLimit,
		httplimit.Limit{Limit: perPlan, Key: user, Cost: httplimit.FixedCost(10)},
	), respond())
	for range 3 {
		require.Equal(t, http.StatusOK, do(handler, request(t)).Code)
	}
	for range 4 {
		require.Equal(t, http.StatusTooManyRequests, do(handler, request(t)).Code)
	}
	require.Equal(t, http.StatusOK, do(handler, request(t, "X-User", "bob")).Code)
	require.Equal(t, 3.0, b.charged(t, perUser.For("ada")))
	require.Equal(t, 30.0, b.charged(t, perPlan.For("ada")), "a refusal takes from no limit")
	require.Equal(t, 4.0, b.charged(t, everyone.Global()))
	require.Equal(t, []string{
		"allowed everyone", "allowed everyone", "allowed everyone",
		"refused perUser", "refused perUser", "refused perUser", "refused perUser",
		"allowed everyone",
	}, b.told.results())
}

func TestWhichRulesApply(t *testing.T) {
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

// TestWithoutAKeyNobodyPasses promises that a request which does not say who it is from is answered so, also where the
// store may fail open, and shares no bucket.
func TestWithoutAKeyNobodyPasses(t *testing.T) {
	t.Parallel()
	b := setup(t)
	fails := func(err error) httplimit.Key {
		return func(*http.Request) (string, error) { return "", err }
	}
	for _, c := range []struct {
		key    httplimit.Key
		status int
		reason string
	}{
		{user, 400, "bad-key"},
		{fails(nil), 400, "bad-key"},
		{fails(fmt.Errorf("%w: sk-live-4242", httplimit.ErrBadKey)), 400, "bad-key"},
		{fails(errors.New("the accounts cannot be read: postgres://site:hunter2@db.test/sk-live-4242")), 503, "not-decided"},
	} {
		for _, open := range []bool{false, true} {
			handler := b.limited(t, httplimit.Config{Limits: []httplimit.Limit{{Limit: perUser, Key: c.key}}, FailOpen: open}, mustNotRun(t))
			r := request(t)
			r.Header.Del("X-User")
			w := do(handler, r)
			require.Equal(t, c.status, w.Code)
			require.Equal(t, c.reason, w.Header().Get("RateLimit-Reason"))
			require.Equal(t, "no-store", w.Header().Get("Cache-Control"))
			require.Equal(t, c.status == 503, w.Header().Get("Retry-After") != "")
			require.NotContains(t, w.Body.String(), "sk-live")
		}
	}
	require.Equal(t, []string{
		"bad_key perUser", "bad_key perUser", "bad_key perUser", "bad_key perUser", "bad_key perUser", "bad_key perUser",
		"failed_closed perUser", "failed_closed perUser",
	}, b.told.results())
	require.Equal(t, 2, strings.Count(b.log.String(), "\n"), "a line for each middleware, about what is not the client's fault")
	require.Contains(t, b.log.String(), "the accounts cannot be read")
	require.NotContains(t, b.log.String(), "hunter2")
}

func mustNotRun(t *testing.T) http.Handler {
	t.Helper()
	return http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("the handler ran") })
}

// TestJitterIsSteadyForAKeyAndOnlyAdds promises that a refused caller waits a little longer than necessary: always the same time, and
// not the same as other callers. Requests of Config.Requests are spread in the same way.
func TestJitterIsSteadyForAKeyAndOnlyAdds(t *testing.T) {
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

func TestNewRefusesWhatCannotWork(t *testing.T) {
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

// TestTheRouteIsTold promises the route in each Answered for the Observer, and in each Refusal for Config.Refused, for limits that are
// enforced and in shadow mode.
func TestTheRouteIsTold(t *testing.T) {
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
	for _, name := range []string{"ada", "bob", "ada", ""} {
		do(handler, request(t, "X-User", name))
	}
	require.Equal(t, map[string]bool{"tried POST /chat": true, "once POST /chat": false}, refused)
	require.Equal(t, []string{
		"allowed once", "allowed once", "shadow_refused tried", "refused once", "shadow_refused tried", "bad_key once",
	}, b.told.results())
	for _, answered := range b.told.answered {
		require.Equal(t, "POST /chat", answered.Route)
	}
	require.ErrorIs(t, b.told.answered[5].Err, httplimit.ErrNoKey)
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

// TestPreflights promises that a preflight is neither counted nor refused with CORS around the limits, nor with Skip in the other order.
// The documentation names every field of a response, for Access-Control-Expose-Headers.
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

// TestCostsAreChargedAndAnswered promises the answer for each cost, and the charge.
func TestCostsAreChargedAndAnswered(t *testing.T) {
	t.Parallel()
	fn := func(cost float64, err error) httplimit.Cost {
		return httplimit.CostFunc(func(*http.Request) (float64, error) { return cost, err })
	}
	header := httplimit.StatedCost{Header: "X-Tokens", Default: 3}
	for name, c := range map[string]struct {
		cost    httplimit.Cost
		stated  string
		status  int
		reason  string
		charged float64
		result  string
	}{
		"Default":       {nil, "", 200, "", 1, "allowed perPlan"},
		"Fixed":         {httplimit.FixedCost(4), "", 200, "", 4, "allowed perPlan"},
		"Free":          {httplimit.FixedCost(0), "", 200, "", 0, "allowed perPlan"},
		"Fraction":      {httplimit.FixedCost(0.25), "", 200, "", 0.25, "allowed perPlan"},
		"Header":        {header, "7", 200, "", 7, "allowed perPlan"},
		"HeaderAbsent":  {header, "", 200, "", 3, "allowed perPlan"},
		"AboveCapacity": {header, "101", 413, "too-costly", 0, "too_costly perPlan"},
		"Infinite":      {header, "1e999", 413, "too-costly", 0, "too_costly perPlan"},
		"Func":          {fn(5, nil), "", 200, "", 5, "allowed perPlan"},
		"FuncRejects":   {fn(5, httplimit.ErrInvalidCost), "", 400, "bad-cost", 0, "bad_cost perPlan"},
		"FuncFails":     {fn(5, errors.New("unreadable")), "", 503, "not-decided", 0, "failed_closed perPlan"},
		"NaN":           {fn(math.NaN(), nil), "", 400, "bad-cost", 0, "bad_cost perPlan"},
		"Negative":      {fn(-1, nil), "", 400, "bad-cost", 0, "bad_cost perPlan"},
		"TooSmall":      {fn(1e-300, nil), "", 400, "bad-cost", 0, "bad_cost perPlan"},
		"TooLarge":      {fn(math.Inf(1), nil), "", 413, "too-costly", 0, "too_costly perPlan"},
	} {
		b := setup(t)
		config := httplimit.Config{Limits: []httplimit.Limit{{Limit: perPlan, Key: user, Cost: c.cost}}, FailOpen: true}
		w := do(b.limited(t, config, respond()), request(t, "X-Tokens", c.stated))
		require.Equal(t, c.status, w.Code, name)
		require.Equal(t, c.reason, w.Header().Get("RateLimit-Reason"), name)
		require.Equal(t, c.status == 503, w.Header().Get("Retry-After") != "", "where a wait may help")
		require.Equal(t, c.charged, b.charged(t, perPlan.For("ada")), name)
		require.Equal(t, []string{c.result}, b.told.results(), name)
	}
}
