// Package http_test runs the middleware of httplimit behind routers, and reads its header fields by a parser that is not its own.
package http_test

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/internal/leaktest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

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
