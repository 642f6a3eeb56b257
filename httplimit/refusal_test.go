package httplimit_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// spent returns a handler whose limit has nothing left for ada.
func (b *bundle) spent(t *testing.T, config httplimit.Config) http.Handler {
	t.Helper()
	config.Limits = append(config.Limits, userLimit)
	handler := b.limited(t, config, mustNotRun(t))
	b.take(t, perUser.For("ada").Cost(3))
	return handler
}

func TestRefusalsComeAsTheClientAccepts(t *testing.T) {
	t.Parallel()
	const (
		problem = "application/problem+json"
		text    = "text/plain; charset=utf-8"
		page    = "text/html; charset=utf-8"
	)
	b := setup(t)
	handler := b.spent(t, httplimit.Config{})
	for accept, want := range map[string]string{
		"":                                      problem,
		"*/*":                                   problem,
		"application/json":                      problem,
		"application/problem+json":              problem,
		"APPLICATION/JSON; q=1.0":               problem,
		"text/plain":                            text,
		"text/*":                                text,
		"text/*, text/plain;q=0":                page,
		"text/html":                             page,
		"text/html, */*":                        page,
		"text/html;q=0.5, text/plain":           text,
		"text/html;q=0.5, */*;q=0.4":            page,
		"text/html;q=0.5, */*;q=0.6":            problem,
		"text/html;level=1, text/plain":         text,
		"application/json;q=0, */*":             text,
		"image/png":                             problem,
		"text/html;q=0":                         problem,
		"text/html;q=much":                      problem,
		"gibberish, ;;;, text/html":             page,
		strings.Repeat("x/y,", 100_000):         problem,
		"application/*;q=0.2, text/plain;q=0.1": problem,
		"text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8": page, // a browser
	} {
		w := do(handler, request(t, "Accept", accept))
		require.Equal(t, http.StatusTooManyRequests, w.Code)
		require.Equal(t, want, w.Header().Get("Content-Type"), "%.60q", accept)
		require.Contains(t, w.Body.String(), "perUser: 3 per minute; retry in 20 s")
		require.Equal(t, "20", w.Header().Get("Retry-After"))
	}
}

func TestHeadGetsNoBody(t *testing.T) {
	t.Parallel()
	b := setup(t)
	r := request(t)
	r.Method = http.MethodHead
	w := do(b.spent(t, httplimit.Config{}), r)
	require.Equal(t, http.StatusTooManyRequests, w.Code)
	require.Empty(t, w.Body.String())
	require.Equal(t, "20", w.Header().Get("Retry-After"))
}

// TestRefuseMayAnswerInItsOwnWay promises that the fields are set for an answer that is replaced, and that it may
// change the default one.
func TestRefuseMayAnswerInItsOwnWay(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handler := b.spent(t, httplimit.Config{Refuse: func(w http.ResponseWriter, r *http.Request, refusal httplimit.Refusal) {
		if refusal.Result == "bad_key" {
			w.Header().Set("WWW-Authenticate", "Bearer")
			refusal.Status, refusal.Title, refusal.Detail = http.StatusUnauthorized, "Unauthorized", "send a token"
			refusal.ServeHTTP(w, r)
			return
		}
		require.Equal(t, []string{"perUser"}, refusal.Violated)
		require.Equal(t, int64(20), refusal.RetryAfter)
		w.WriteHeader(http.StatusTeapot)
	}})
	w := do(handler, request(t))
	require.Equal(t, http.StatusTeapot, w.Code)
	require.Equal(t, "20", w.Header().Get("Retry-After"))
	require.Equal(t, "no-store", w.Header().Get("Cache-Control"))
	require.Equal(t, `"perUser";r=0;t=20`, w.Header().Get("RateLimit"))

	r := request(t)
	r.Header.Del("X-User")
	w = do(handler, r)
	require.Equal(t, http.StatusUnauthorized, w.Code)
	require.Equal(t, "Bearer", w.Header().Get("WWW-Authenticate"))
	require.Contains(t, w.Body.String(), "send a token")
}

// TestSetReplacesTheFields promises the fields of the last decision, and none of no decision.
func TestSetReplacesTheFields(t *testing.T) {
	t.Parallel()
	b, header := setup(t), http.Header{"Ratelimit": {"of another decision"}}
	httplimit.DraftHeaders.Set(header, ratelimit.Decision{})
	require.Len(t, header, 1)
	d, err := b.limiter.Take(t.Context(), everyone.Global())
	require.NoError(t, err)
	httplimit.DraftHeaders.Set(header, d)
	httplimit.DraftHeaders.Set(header, d)
	require.Equal(t, http.Header{"Ratelimit-Policy": {`"everyone";q=1000;w=86400`}, "Ratelimit": {`"everyone";r=999;t=86314`}}, header)
}
