package httplimit_test

import (
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
)

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
