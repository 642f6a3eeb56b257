package http_test

import (
	"errors"
	"io"
	"net/http"
	"testing"

	"github.com/go-chi/chi/v5"
	"github.com/labstack/echo/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

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

// answerErrors answers the errors of handlers. Echo answers them after the middleware, which then cannot see their status: a limit with
// a Credit needs answerErrors inside.
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

// TestErrorsOfEchoHandlers promises that a handler of Echo that returns an error is charged, even if the limit has a Credit, and that
// with answerErrors inside the status counts.
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
