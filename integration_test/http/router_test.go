// Package http_test runs the middleware of httplimit behind routers, and reads its header fields by a parser that is
// not its own.
package http_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"
	"time"

	"github.com/dunglas/httpsfv"
	"github.com/gin-gonic/gin"
	"github.com/go-chi/chi/v5"
	"github.com/labstack/echo/v5"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var (
	everyone  = ratelimit.Define("everyone", ratelimit.PerDay(1000))
	perUser   = ratelimit.Define("perUser", ratelimit.PerMinute(3))
	userLimit = httplimit.Limit{Limit: perUser, Key: user, Credit: httplimit.CreditOn5xx}
)

// user returns the caller, whom a header names.
func user(r *http.Request) (string, error) { return r.Header.Get("X-User"), nil }

// limited returns the middleware for one limit.
func limited(t *testing.T, limiter *ratelimit.Limiter, limit httplimit.Limit) func(http.Handler) http.Handler {
	t.Helper()
	middleware, err := httplimit.New(limiter, httplimit.Config{Limits: []httplimit.Limit{limit}, DecisionTimeout: time.Minute})
	require.NoError(t, err)
	return middleware
}

// get sends a request of ada.
func get(t *testing.T, handler http.Handler, path string) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil)
	r.Header.Set("X-User", "ada")
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, r)
	return w
}

// charged returns the tokens that were taken from a bucket.
func charged(t *testing.T, limiter *ratelimit.Limiter, request ratelimit.Request) float64 {
	t.Helper()
	v, err := limiter.Value(t.Context(), request)
	require.NoError(t, err)
	return request.Limit().Capacity() - v.Tokens
}

// A router limits everything once, and one of the routes once more.
type router func(everything, search func(http.Handler) http.Handler) http.Handler

func home(w http.ResponseWriter, _ *http.Request)  { _, _ = io.WriteString(w, "home") }
func found(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "found") }

func muxRouter(everything, search func(http.Handler) http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", home)
	mux.Handle("GET /search", search(http.HandlerFunc(found)))
	return everything(mux)
}

// chiRouter passes the middleware to chi unchanged, for the router and for a route.
func chiRouter(everything, search func(http.Handler) http.Handler) http.Handler {
	router := chi.NewRouter()
	router.Use(everything)
	router.Get("/", home)
	router.With(search).Get("/search", found)
	return router
}

// echoRouter wraps the middleware by echo.WrapMiddleware, for the router and for a route.
func echoRouter(everything, search func(http.Handler) http.Handler) http.Handler {
	router := echo.New()
	router.Use(echo.WrapMiddleware(everything))
	router.GET("/", func(c *echo.Context) error { return c.String(http.StatusOK, "home") })
	router.GET("/search", func(c *echo.Context) error { return c.String(http.StatusOK, "found") },
		echo.WrapMiddleware(search), answerErrors)
	return router
}

// answerErrors answers the errors of handlers. Echo answers them after the middleware, which then cannot see their
// status: a limit with a Credit needs answerErrors inside.
func answerErrors(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c *echo.Context) error {
		if err := next(c); err != nil {
			c.Echo().HTTPErrorHandler(c, err)
		}
		return nil
	}
}

// TestRouters promises that the middleware works with each router, in front of everything and of one route.
func TestRouters(t *testing.T) {
	t.Parallel()
	for name, router := range map[string]router{"net/http": muxRouter, "chi": chiRouter, "Echo": echoRouter, "Gin": ginRouter} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			limiter := ratelimittest.New(t, ratelimittest.NewClock())
			handler := router(limited(t, limiter, httplimit.Limit{Limit: everyone, Global: true}), limited(t, limiter, userLimit))
			for i := range 5 {
				got := get(t, handler, "/")
				require.Equal(t, http.StatusOK, got.Code)
				require.Equal(t, "home", got.Body.String())
				got = get(t, handler, "/search")
				if i < 3 {
					require.Equal(t, "found", got.Body.String())
					continue
				}
				require.Equal(t, http.StatusTooManyRequests, got.Code)
				require.Contains(t, got.Body.String(), "perUser: 3 per minute")
			}
			require.Equal(t, 10.0, charged(t, limiter, everyone.Global()))
			require.Equal(t, 3.0, charged(t, limiter, perUser.For("ada")))
		})
	}
}

// TestErrorsOfEchoHandlers promises that a handler of Echo that returns an error is charged, even if the limit has a
// Credit, and that with answerErrors inside the status counts.
func TestErrorsOfEchoHandlers(t *testing.T) {
	t.Parallel()
	limiter := ratelimittest.New(t, ratelimittest.NewClock())
	credit := func(credit httplimit.Credit) echo.MiddlewareFunc {
		limit := userLimit
		limit.Credit = credit
		return echo.WrapMiddleware(limited(t, limiter, limit))
	}
	fail := func(c *echo.Context) error {
		admission, ok := httplimit.FromContext(c.Request().Context())
		if !ok || !admission.Decision().Allowed {
			return c.String(http.StatusOK, "the middleware's context is lost")
		}
		return errors.New("the handler's own")
	}
	router := echo.New()
	router.GET("/5xx", fail, credit(httplimit.CreditOn5xx))
	router.GET("/failures", fail, credit(httplimit.CountOnlyFailures))
	router.GET("/answered", fail, credit(httplimit.CreditOn5xx), answerErrors)
	for i, path := range []string{"/5xx", "/failures", "/answered"} {
		got := get(t, router, path)
		require.Equal(t, http.StatusInternalServerError, got.Code, got.Body.String())
		require.Equal(t, float64(min(i+1, 2)), charged(t, limiter, perUser.For("ada")), path)
	}
}

// forGin runs the middleware in Gin. docs/guide.md links to it.
func forGin(limited func(http.Handler) http.Handler) gin.HandlerFunc {
	return func(c *gin.Context) {
		allowed := false
		limited(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			allowed, c.Request = true, r
			c.Next()
			w.WriteHeader(c.Writer.Status()) // a Credit reads it
		})).ServeHTTP(c.Writer, c.Request)
		if !allowed {
			c.Abort()
		}
	}
}

// ginRouter wraps the middleware by forGin, for the router and for a route.
func ginRouter(everything, search func(http.Handler) http.Handler) http.Handler {
	router := gin.New()
	router.Use(forGin(everything))
	router.GET("/", func(c *gin.Context) { c.String(http.StatusOK, "home") })
	router.GET("/search", forGin(search), func(c *gin.Context) { c.String(http.StatusOK, "found") })
	return router
}

// TestCreditsBehindGin promises that a Credit sees the status of a handler of Gin, also of a panicking handler, and
// that the handler has the middleware's context.
func TestCreditsBehindGin(t *testing.T) {
	t.Parallel()
	limiter := ratelimittest.New(t, ratelimittest.NewClock())
	limit := userLimit
	limit.Credit = httplimit.CreditOn5xx
	router := gin.New()
	router.Use(gin.CustomRecoveryWithWriter(nil, func(c *gin.Context, _ any) { c.AbortWithStatus(http.StatusInternalServerError) }), forGin(limited(t, limiter, limit)))
	router.GET("/:status", func(c *gin.Context) {
		admission, ok := httplimit.FromContext(c.Request.Context())
		require.True(t, ok)
		require.True(t, admission.Decision().Allowed)
		switch c.Param("status") {
		case "panic":
			panic(errors.New("the handler's own"))
		case "500":
			c.AbortWithStatus(http.StatusInternalServerError)
		default:
			c.Status(http.StatusNoContent)
		}
	})
	for _, c := range []struct {
		path    string
		status  int
		charged float64
	}{{"/204", 204, 1}, {"/500", 500, 1}, {"/panic", 500, 1}, {"/204", 204, 2}} {
		require.Equal(t, c.status, get(t, router, c.path).Code, c.path)
		require.Equal(t, c.charged, charged(t, limiter, perUser.For("ada")), c.path)
	}
}

// TestGinStreamsInsideTheMiddleware promises that the writer for a Credit has CloseNotify, which the Stream of Gin calls.
func TestGinStreamsInsideTheMiddleware(t *testing.T) {
	t.Parallel()
	limit := userLimit
	limit.Credit = httplimit.CreditOn5xx
	router := gin.New()
	router.GET("/", func(c *gin.Context) {
		require.False(t, c.Stream(func(io.Writer) bool { return false }), "the client is not gone")
	})
	require.Equal(t, http.StatusOK, get(t, limited(t, ratelimittest.New(t, nil), limit)(router), "/").Code)
}

// requireDraftFields checks that both fields are what the draft says, by a parser of structured fields, and returns the
// numbers of each policy.
func requireDraftFields(t *testing.T, header http.Header) (policies, limits map[string]map[string]int64) {
	t.Helper()
	parse := func(field string, required []string, optional string) map[string]map[string]int64 {
		list, err := httpsfv.UnmarshalList(header.Values(field))
		require.NoError(t, err, "%s: %q", field, header.Values(field))
		require.NotEmpty(t, list)
		all := make(map[string]map[string]int64)
		for _, member := range list {
			item, ok := member.(httpsfv.Item)
			require.True(t, ok)
			require.IsType(t, "", item.Value, "the name of a policy is a String")
			numbers := make(map[string]int64)
			for _, parameter := range append(required, optional) {
				value, found := item.Params.Get(parameter)
				if !found && parameter == optional {
					continue
				}
				require.True(t, found, "%s has no %s", field, parameter)
				require.IsType(t, int64(0), value, "%s is an Integer", parameter)
				numbers[parameter], _ = value.(int64)
				require.GreaterOrEqual(t, numbers[parameter], int64(0))
			}
			name, _ := item.Value.(string)
			require.NotContains(t, all, name, "each policy is stated once")
			all[name] = numbers
		}
		return all
	}
	policies, limits = parse("RateLimit-Policy", []string{"q"}, "w"), parse("RateLimit", []string{"r"}, "t")
	for name, p := range policies {
		require.Positive(t, p["q"], name)
		if w, found := p["w"]; found {
			require.Positive(t, w, name)
		}
	}
	for name, l := range limits {
		require.Contains(t, policies, name)
		require.LessOrEqual(t, l["r"], policies[name]["q"], "no more than the quota is left of %s", name)
	}
	return policies, limits
}

func drawPolicy(rt *rapid.T) ratelimit.Policy {
	rate := rapid.OneOf(rapid.Map(rapid.IntRange(1, 100_000), func(n int) float64 { return float64(n) }), rapid.Float64Range(0.01, 1000)).Draw(rt, "rate")
	period := time.Duration(rapid.OneOf(
		rapid.SampledFrom([]int64{1, 60, 3600, 86400, 604800}),
		rapid.Int64Range(1, 1_000_000),
	).Draw(rt, "seconds")) * time.Second
	if rapid.Bool().Draw(rt, "uneven") {
		period += time.Duration(rapid.Int64Range(1, 999_999).Draw(rt, "microseconds")) * time.Microsecond
	}
	capacity := rapid.Float64Range(1, 10).Draw(rt, "capacity") * max(rate, 1)
	if rapid.Bool().Draw(rt, "fixed") {
		return ratelimit.FixedWindow{Rate: rate, Period: period, Capacity: capacity}
	}
	return ratelimit.TokenBucket{Rate: rate, Period: period, Capacity: capacity}
}

// TestFieldsHoldForEveryPolicy checks the fields for any policy and any state of its bucket. A parser of structured
// fields reads them, and their numbers are whole and not negative. A client that spreads the remaining tokens of a
// token bucket evenly over the window does not exceed the rate. RateLimit and Retry-After agree, and a lone caller is
// allowed after Retry-After.
func TestFieldsHoldForEveryPolicy(t *testing.T) {
	t.Parallel()
	clock := ratelimittest.NewClock()
	limiter := ratelimittest.New(t, clock)
	run := 0
	rapid.Check(t, func(rt *rapid.T) {
		run++
		policy := drawPolicy(rt)
		limit, err := ratelimit.NewLimit(rapid.StringMatching(`[A-Za-z0-9_.:/-]{1,64}`).Draw(rt, "limit"), policy)
		require.NoError(rt, err)
		cost := rapid.Float64Range(0.001, 1).Draw(rt, "cost") * limit.Capacity()
		unit := rapid.StringMatching(`[a-z0-9-]{0,32}`).Draw(rt, "unit")
		name := fmt.Sprint("user ", run)
		key := func(*http.Request) (string, error) { return name, nil }
		handler := limited(t, limiter, httplimit.Limit{Limit: limit, Key: key, Cost: httplimit.FixedCost(cost), Unit: unit})(http.HandlerFunc(home))
		for range rapid.IntRange(1, 5).Draw(rt, "requests") {
			clock.Advance(time.Duration(rapid.Int64Range(0, 2_000_000_000).Draw(rt, "pause")) * time.Microsecond)
			w := get(t, handler, "/")
			policies, limits := requireDraftFields(t, w.Header())
			q, width, left, window := policies[limit.Name()]["q"], policies[limit.Name()]["w"], limits[limit.Name()]["r"], limits[limit.Name()]["t"]
			require.Positive(rt, window)
			require.LessOrEqual(rt, float64(left), limit.Capacity())
			if w.Code == http.StatusOK {
				if _, fixed := policy.(ratelimit.FixedWindow); !fixed && left > 0 {
					require.LessOrEqual(rt, float64(left)*float64(width), float64(q+1)*float64(window), "spread evenly it is no faster than the rate")
				}
				continue
			}
			require.Equal(rt, http.StatusTooManyRequests, w.Code)
			wait, err := strconv.ParseInt(w.Header().Get("Retry-After"), 10, 64)
			require.NoError(rt, err)
			require.GreaterOrEqual(rt, wait, window)
			clock.Advance(time.Duration(wait) * time.Second)
			require.Equal(rt, http.StatusOK, get(t, handler, "/").Code, "a caller that waits for Retry-After is allowed")
		}
	})
}
