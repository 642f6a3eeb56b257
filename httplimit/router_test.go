package httplimit_test

import (
	"errors"
	"io"
	"net/http"
	"testing"

	"github.com/labstack/echo/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
)

func muxRouter(everything, search func(http.Handler) http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "home") })
	mux.Handle("GET /search", search(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "found") })))
	return everything(mux)
}

// TestRouters promises that the middleware works with each router as it is, in front of everything and of one route.
func TestRouters(t *testing.T) {
	t.Parallel()
	for name, router := range map[string]func(everything, search func(http.Handler) http.Handler) http.Handler{
		"net/http": muxRouter, "chi": chiRouter, "Echo": echoRouter,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			middleware := func(rule httplimit.Rule) func(http.Handler) http.Handler {
				return func(next http.Handler) http.Handler { return b.limited(t, rules(rule), next) }
			}
			refunding := userRule
			refunding.Refund = httplimit.RefundOn5xx
			server := serve(t, router(middleware(httplimit.Rule{Limit: everyone, Global: true}), middleware(refunding)))
			for i := range 5 {
				status, body, err := get(t.Context(), server, "/")
				require.NoError(t, err)
				require.Equal(t, http.StatusOK, status)
				require.Equal(t, "home", body)
				status, body, err = get(t.Context(), server, "/search")
				require.NoError(t, err)
				if i < 3 {
					require.Equal(t, "found", body)
					continue
				}
				require.Equal(t, http.StatusTooManyRequests, status)
				require.Contains(t, body, "perUser: 3 per minute")
			}
			require.Equal(t, 10.0, b.charged(t, everyone.Global()))
			require.Equal(t, 3.0, b.charged(t, perUser.For("ada")))
		})
	}
}

// TestErrorsOfEchoHandlers promises that a handler of Echo that returns an error is charged, whatever the rule
// would refund, and that with answerErrors inside the status counts.
func TestErrorsOfEchoHandlers(t *testing.T) {
	t.Parallel()
	b := setup(t)
	refund := func(refund httplimit.Refund) echo.MiddlewareFunc {
		rule := userRule
		rule.Refund = refund
		return echo.WrapMiddleware(func(next http.Handler) http.Handler { return b.limited(t, rules(rule), next) })
	}
	fail := func(c *echo.Context) error {
		admission, ok := httplimit.FromContext(c.Request().Context())
		if !ok || !admission.Decision().Allowed {
			return c.String(http.StatusOK, "the middleware's context is lost")
		}
		return errors.New("the handler's own")
	}
	router := echo.New()
	router.GET("/5xx", fail, refund(httplimit.RefundOn5xx))
	router.GET("/failures", fail, refund(httplimit.CountOnlyFailures))
	router.GET("/answered", fail, refund(httplimit.RefundOn5xx), answerErrors)
	for i, path := range []string{"/5xx", "/failures", "/answered"} {
		w := do(router, at(t, path))
		require.Equal(t, http.StatusInternalServerError, w.Code, w.Body.String())
		require.Equal(t, float64(min(i+1, 2)), b.charged(t, perUser.For("ada")), path)
	}
}
