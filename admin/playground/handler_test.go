package playground_test

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/admin/playground"
	"github.com/pgratelimit/pgratelimit/middleware/httplimit/client"
)

func TestHandler(t *testing.T) {
	t.Parallel()
	handler := playground.Handler()
	serve := func(method, path string, headers ...string) *httptest.ResponseRecorder {
		r := httptest.NewRequestWithContext(t.Context(), method, path, nil)
		for i := 0; i < len(headers); i += 2 {
			r.Header.Set(headers[i], headers[i+1])
		}
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		return w
	}
	for path, contentType := range map[string]string{ // below any prefix
		"/":                         "text/html; charset=utf-8",
		"/a/b/playground/":          "text/html; charset=utf-8",
		"/playground/index.html":    "text/html; charset=utf-8",
		"/playground/style.css":     "text/css; charset=utf-8",
		"/playground/main.js":       "text/javascript; charset=utf-8",
		"/a/playground/presets.js":  "text/javascript; charset=utf-8",
		"/playground/ratelimit.js":  "text/javascript; charset=utf-8",
		"/playground/player.js?v=1": "text/javascript; charset=utf-8",
	} {
		got := serve(http.MethodGet, path)
		require.Equal(t, http.StatusOK, got.Code, path)
		require.Equal(t, contentType, got.Header().Get("Content-Type"), path)
		require.NotEmpty(t, got.Body.String(), path)
	}
	require.Equal(t, string(client.Module()), serve(http.MethodGet, "/playground/ratelimit.js").Body.String())
	for _, path := range []string{"/playground", "/playground/web", "/playground/handler.go", "/playground/..", "/playground/main"} {
		got := serve(http.MethodGet, path)
		require.Equal(t, http.StatusNotFound, got.Code, path)
		require.Equal(t, "nosniff", got.Header().Get("X-Content-Type-Options"))
	}

	got := serve(http.MethodGet, "/playground/").Header()
	require.Equal(t, "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "+
		"base-uri 'none'; form-action 'none'; frame-ancestors 'self'", got.Get("Content-Security-Policy"))
	require.Equal(t, "nosniff", got.Get("X-Content-Type-Options"))

	// What a browser has is not sent again.
	got = serve(http.MethodGet, "/main.js").Header()
	require.Equal(t, "no-cache", got.Get("Cache-Control"))
	tag := got.Get("ETag")
	require.Regexp(t, `^"[A-Za-z0-9_-]{43}"$`, tag)
	require.Equal(t, http.StatusNotModified, serve(http.MethodGet, "/main.js", "If-None-Match", tag).Code)
	require.Equal(t, http.StatusOK, serve(http.MethodGet, "/load.js", "If-None-Match", tag).Code)

	require.Equal(t, http.StatusOK, serve(http.MethodHead, "/").Code)
	posted := serve(http.MethodPost, "/")
	require.Equal(t, http.StatusMethodNotAllowed, posted.Code)
	require.Equal(t, "GET, HEAD", posted.Header().Get("Allow"))
}
