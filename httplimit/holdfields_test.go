package httplimit_test

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestFieldsOfSlots promises fields with the number of slots and of free slots, beside the tokens.
func TestFieldsOfSlots(t *testing.T) {
	t.Parallel()
	b := setup(t)
	config := limits(slotLimit, userLimit)
	var second, third *httptest.ResponseRecorder
	first := do(b.limited(t, config, inline(func(exchange) {
		second = do(b.limited(t, config, inline(func(exchange) {
			third = do(b.limited(t, config, respond()), request(t))
		})), request(t))
	})), request(t))
	const policies = `"atOnce";q=2;qu="concurrent-requests", "perUser";q=3;w=60`
	for w, limits := range map[*httptest.ResponseRecorder]string{
		first: `"atOnce";r=1, "perUser";r=2;t=40`, second: `"atOnce";r=0, "perUser";r=1;t=20`, third: `"atOnce";r=0`,
	} {
		require.Equal(t, policies, w.Header().Get("RateLimit-Policy"))
		require.Equal(t, limits, w.Header().Get("RateLimit"))
	}
	require.Equal(t, http.StatusTooManyRequests, third.Code)
	require.Equal(t, "3", third.Header().Get("Retry-After"))
	require.Contains(t, third.Body.String(), "atOnce: 2 at a time; retry in 3 s")
}
