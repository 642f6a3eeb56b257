package httplimit_test

import (
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
)

// exposed is what the documentation says to name in Access-Control-Expose-Headers.
func exposed(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("doc.go")
	require.NoError(t, err)
	found := regexp.MustCompile(`Access-Control-Expose-Headers: (.*)`).FindSubmatch(text)
	require.NotNil(t, found)
	return string(found[1])
}

// crossOrigin is middleware as those for CORS are: it answers preflights by itself, and names what pages may read.
func crossOrigin(expose string, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Access-Control-Allow-Origin", r.Header.Get("Origin"))
		if r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != "" {
			w.Header().Set("Access-Control-Allow-Headers", "X-User")
			w.WriteHeader(http.StatusNoContent)
			return
		}
		w.Header().Set("Access-Control-Expose-Headers", expose)
		next.ServeHTTP(w, r)
	})
}

// preflight is what a browser asks before a request of a page of another origin. It has no X-User.
func preflight(t *testing.T) *http.Request {
	t.Helper()
	r := request(t, "Origin", "https://app.example", "Access-Control-Request-Method", "POST", "Access-Control-Request-Headers", "x-user")
	r.Method = http.MethodOptions
	r.Header.Del("X-User")
	return r
}

// TestPreflightsAreNeitherCountedNorRefused is the documented order: CORS around the limits. A page of another origin can read
// every field of an answer and of a refusal.
func TestPreflightsAreNeitherCountedNorRefused(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handler := crossOrigin(exposed(t), b.limited(t, limits(userLimit), respond()))
	for range 4 {
		w := do(handler, preflight(t))
		require.Equal(t, http.StatusNoContent, w.Code)
		requireNoFields(t, w.Header())
		w = do(handler, request(t, "Origin", "https://app.example"))
		require.Equal(t, "https://app.example", w.Header().Get("Access-Control-Allow-Origin"), "also of a refusal, or the page could not read it")
		named := strings.Split(w.Header().Get("Access-Control-Expose-Headers"), ", ")
		for i := range named {
			named[i] = http.CanonicalHeaderKey(named[i])
		}
		for name := range w.Header() {
			if strings.HasPrefix(name, "Ratelimit") || name == "Retry-After" {
				require.True(t, slices.Contains(named, name), name)
			}
		}
	}
	require.Equal(t, 3.0, b.charged(t, perUser.For("ada")))
	require.Equal(t, []string{"allowed perUser", "allowed perUser", "allowed perUser", "refused perUser"}, b.told.results())
	w := do(handler, preflight(t))
	require.Equal(t, http.StatusNoContent, w.Code, "when nothing is left, too")
}

// TestPreflightsCanBeSkipped is the other order, for routers that answer preflights by themselves.
func TestPreflightsCanBeSkipped(t *testing.T) {
	t.Parallel()
	b := setup(t)
	config := limits(userLimit)
	require.Equal(t, http.StatusBadRequest, do(b.limited(t, config, crossOrigin("", respond())), preflight(t)).Code, "a preflight says nothing of who asks")
	config.Skip = httplimit.IsPreflight
	handler := b.limited(t, config, crossOrigin("", respond()))
	require.Equal(t, http.StatusNoContent, do(handler, preflight(t)).Code)
	plain := request(t)
	plain.Method = http.MethodOptions
	require.NotEmpty(t, do(handler, plain).Header().Get("RateLimit"), "an OPTIONS that is no preflight is counted")
}
