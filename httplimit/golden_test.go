package httplimit_test

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/internal/golden"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

// response returns the status line, the header fields in the order of their names, and the body of a response.
func response(w *httptest.ResponseRecorder) string {
	var text strings.Builder
	fmt.Fprintf(&text, "%d %s\n", w.Code, http.StatusText(w.Code))
	for _, name := range slices.Sorted(maps.Keys(w.Header())) {
		for _, value := range w.Header()[name] {
			fmt.Fprintf(&text, "%s: %s\n", name, value)
		}
	}
	return text.String() + "\n" + strings.TrimRight(w.Body.String(), "\n") + "\n"
}

// inMemory returns handler behind the middleware, on a limiter in memory at 10:00:01.5.
func inMemory(t *testing.T, config httplimit.Config, handler http.Handler) http.Handler {
	t.Helper()
	config.DecisionTimeout, config.Logger = patient, slog.New(slog.DiscardHandler)
	clock := ratelimittest.NewClock()
	clock.Set(ten.Add(1500 * time.Millisecond))
	middleware, err := httplimit.New(ratelimittest.New(t, clock), config)
	require.NoError(t, err)
	return middleware(handler)
}

// TestHeaderFields compares the fields that state limits, in each form, with testdata/fields.txt: before and after the last token.
func TestHeaderFields(t *testing.T) {
	t.Parallel()
	var text strings.Builder
	for _, form := range []struct {
		name    string
		headers httplimit.Headers
	}{
		{"draft", httplimit.DraftHeaders},
		{"trio", httplimit.Draft06Headers},
		{"epoch", httplimit.EpochHeaders},
		{"none", httplimit.NoHeaders},
	} {
		for _, c := range []struct {
			name   string
			limits []httplimit.Limit
		}{
			{"token bucket", []httplimit.Limit{{Limit: perUser, Key: user, Cost: httplimit.FixedCost(3)}}},
			{"fixed window", []httplimit.Limit{{Limit: windowed, Key: user, Cost: httplimit.FixedCost(10)}}},
			{"sliding window", []httplimit.Limit{{Limit: anyMinute, Key: user, Cost: httplimit.FixedCost(10)}}},
			{"tokens", []httplimit.Limit{{Limit: llmTokens, Key: user, Unit: "tokens", Cost: httplimit.FixedCost(40_000)}}},
			{"requests and tokens", []httplimit.Limit{
				{Limit: rpm, Key: user}, {Limit: llmTokens, Key: user, Unit: "tokens", Cost: httplimit.FixedCost(20_500)},
			}},
			{"two limits", []httplimit.Limit{{Limit: perUser, Key: user, Cost: httplimit.FixedCost(3)}, {Limit: everyone, Global: true}}},
		} {
			handler := inMemory(t, httplimit.Config{Limits: c.limits, Headers: form.headers}, respond())
			for _, call := range []string{"allowed", "refused"} {
				fmt.Fprintf(&text, "== %s: %s, %s ==\n", form.name, c.name, call)
				w := do(handler, request(t))
				w.Body.Reset() // TestAnswers has bodies
				text.WriteString(response(w))
			}
		}
	}
	golden.Equal(t, "fields.txt", text.String())
}

// TestAnswers compares the answers to requests that are not served with testdata/answers.txt: status, fields and body in each form.
func TestAnswers(t *testing.T) {
	t.Parallel()
	costOf := func(cost float64) httplimit.Cost {
		return httplimit.CostFunc(func(*http.Request) (float64, error) { return cost, nil })
	}
	failing := func(err error) httplimit.Key { return func(*http.Request) (string, error) { return "", err } }
	spend := func(config httplimit.Config) http.Handler {
		handler := inMemory(t, config, respond())
		do(handler, request(t))
		return handler
	}
	all := httplimit.FixedCost(3)
	paused := ratelimit.Decision{RetryAfter: 90 * time.Second, States: []ratelimit.State{{
		Limit: perUser, Rule: "perUser/pro", Mode: ratelimit.On, PausedUntil: ten.Add(90 * time.Second), PauseReason: "for people who operate it", NotAsked: true,
	}}}
	var text strings.Builder
	for _, c := range []struct {
		name    string
		handler http.Handler
	}{
		{"refused", spend(limits(httplimit.Limit{Limit: perUser, Key: user, Cost: all}))},
		{"refused by two limits", spend(limits(
			httplimit.Limit{Limit: perUser, Key: user, Cost: all}, httplimit.Limit{Limit: windowed, Key: user, Cost: httplimit.FixedCost(10)}))},
		{"paused", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { httplimit.NewRefusal(paused).ServeHTTP(w, r) })},
		{"no key", inMemory(t, limits(httplimit.Limit{Limit: perUser, Key: failing(httplimit.ErrNoKey)}), respond())},
		{"bad key", inMemory(t, limits(httplimit.Limit{Limit: perUser, Key: failing(httplimit.ErrBadKey)}), respond())},
		{"bad cost", inMemory(t, limits(httplimit.Limit{Limit: perUser, Key: user, Cost: costOf(-1)}), respond())},
		{"too costly", inMemory(t, limits(httplimit.Limit{Limit: perUser, Key: user, Cost: costOf(4)}), respond())},
		{"not decided", inMemory(t, limits(httplimit.Limit{Limit: perUser, Key: failing(errors.New("no connection"))}), respond())},
	} {
		for _, accept := range []string{"application/json", "text/plain", "text/html"} {
			fmt.Fprintf(&text, "== %s, as %s ==\n%s\n", c.name, accept, response(do(c.handler, request(t, "Accept", accept))))
		}
	}
	golden.Equal(t, "answers.txt", text.String())
}
