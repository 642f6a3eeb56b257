package client_test

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/middleware/httplimit/client"
)

// TestHandler promises a script that browsers revalidate, do not sniff, and do not load twice.
func TestHandler(t *testing.T) {
	t.Parallel()
	serve := func(method string, headers ...string) *httptest.ResponseRecorder {
		r := httptest.NewRequestWithContext(t.Context(), method, "/ratelimit.js", nil)
		for i := 0; i < len(headers); i += 2 {
			r.Header.Set(headers[i], headers[i+1])
		}
		w := httptest.NewRecorder()
		client.Handler().ServeHTTP(w, r)
		return w
	}
	got := serve(http.MethodGet)
	require.Equal(t, http.StatusOK, got.Code)
	require.Equal(t, "text/javascript; charset=utf-8", got.Header().Get("Content-Type"))
	require.Equal(t, "nosniff", got.Header().Get("X-Content-Type-Options"))
	require.Equal(t, "no-cache", got.Header().Get("Cache-Control"))
	require.Empty(t, got.Header().Get("Access-Control-Allow-Origin"))
	require.Contains(t, got.Body.String(), "export function evaluate(")
	require.Equal(t, string(client.Module()), got.Body.String())
	tag := got.Header().Get("ETag")
	require.Regexp(t, `^"[A-Za-z0-9_-]{43}"$`, tag)
	require.Equal(t, http.StatusNotModified, serve(http.MethodGet, "If-None-Match", tag).Code)
	require.Equal(t, http.StatusOK, serve(http.MethodHead, "If-None-Match", `"other"`).Code)
	got = serve(http.MethodPost)
	require.Equal(t, http.StatusMethodNotAllowed, got.Code)
	require.Equal(t, "GET, HEAD", got.Header().Get("Allow"))
}
