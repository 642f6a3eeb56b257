package httplimit_test

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/ratelimittest"
)

var (
	sendMessage = ratelimit.Define("sendMessage", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3})
	llmTokens   = ratelimit.Define("llmTokens", ratelimit.PerMinute(40_000))
	freeTrial   = ratelimit.Define("freeTrialSignUp", ratelimit.FixedWindow{Rate: 100, Period: time.Hour, Start: ten})
	rpm         = ratelimit.Define("rpm", ratelimit.PerMinute(60))
	rpd         = ratelimit.Define("rpd", ratelimit.FixedWindow{Rate: 1000, Period: ratelimit.Day, Start: ten.Add(-10 * time.Hour)})
)

var (
	anyMinute = ratelimit.Define("anyMinute", ratelimit.SlidingWindow{Rate: 10, Period: time.Minute, Slices: 6})
	aMonth    = ratelimit.Define("aMonth", ratelimit.CalendarWindow{Rate: 1000, Resets: ratelimit.Monthly, Zone: "Europe/Berlin"})
	slots     = ratelimit.Define("slots", ratelimit.Concurrency{Slots: 3, Lease: time.Minute})
)

func one(limit ratelimit.Limit) []httplimit.Limit {
	return []httplimit.Limit{{Limit: limit, Key: user}}
}

// requireNoFields checks that nothing is said about limits.
func requireNoFields(t *testing.T, header http.Header) {
	t.Helper()
	for name := range header {
		require.NotContains(t, name, "Ratelimit")
	}
	require.NotContains(t, header, "Retry-After")
}

// TestQuotasAreWholeNumbers promises that a rate that is no whole number of tokens in whole seconds is stated as
// one.
func TestQuotasAreWholeNumbers(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for want, policy := range map[string]ratelimit.Policy{
		`"odd";q=10;w=60`:             ratelimit.PerMinute(10),
		`"odd";q=1;w=2`:               ratelimit.TokenBucket{Rate: 0.5, Period: time.Second, Capacity: 5},
		`"odd";q=50;w=1`:              ratelimit.TokenBucket{Rate: 5, Period: 100 * time.Millisecond},
		`"odd";q=2;w=3`:               ratelimit.TokenBucket{Rate: 1, Period: 1500 * time.Millisecond},
		`"odd";q=1;w=3`:               ratelimit.TokenBucket{Rate: 1.0 / 3, Period: time.Second, Capacity: 5},
		`"odd";q=3;w=1`:               ratelimit.PerSecond(3.14159265358979), // rounded down
		`"odd";q=1;w=86400000`:        ratelimit.TokenBucket{Rate: 0.001, Period: ratelimit.Day, Capacity: 5},
		`"odd";q=1000000000000;w=1`:   ratelimit.PerSecond(1e12),
		`"odd";q=999999999999999;w=1`: ratelimit.TokenBucket{Rate: 1e12, Period: time.Microsecond, Capacity: 1e12},
		`"odd";q=5;w=3155760000`:      ratelimit.TokenBucket{Rate: 5, Period: 36525 * ratelimit.Day},
		`"odd";q=7;w=604800`:          &ratelimit.TokenBucket{Rate: 7, Period: ratelimit.Week},
		`"odd";q=1000000;w=3`:         ratelimit.TokenBucket{Rate: 1, Period: 3 * time.Microsecond, Capacity: 5},
		`"odd";q=60;w=60`:             &ratelimit.FixedWindow{Rate: 60, Period: time.Minute},
		`"odd";q=5;w=2`:               &ratelimit.SlidingWindow{Rate: 2.5, Period: time.Second, Slices: 10},
		`"odd";q=7`:                   &ratelimit.CalendarWindow{Rate: 7, Resets: ratelimit.Daily},
	} {
		limit := ratelimit.Define("odd", policy)
		w := do(b.limited(t, limits(httplimit.Limit{Limit: limit, Key: user, Cost: httplimit.FixedCost(0)}), respond()), request(t))
		require.Equal(t, want, w.Header().Get("RateLimit-Policy"), "%v", policy)
	}
}

// example is an example of the draft: the limits, the tokens taken before, the request and its time, and the fields of
// the response.
type example struct {
	limits        []httplimit.Limit
	spent         float64       // of the last limit
	at            time.Duration // after ten
	cost          float64
	status        int
	policy, limit string
	retry         string
}

// TestDraftHeadersOfTheWorkedExamples promises fields that are true for a client that reads them alone: the tokens
// left, rounded down, and the seconds until there is more, rounded up.
func TestDraftHeadersOfTheWorkedExamples(t *testing.T) {
	t.Parallel()
	const (
		message, trial, month = `"sendMessage";q=10;w=60`, `"freeTrialSignUp";q=100;w=3600`, `"aMonth";q=1000`
		tokens, sliding, two  = `"llmTokens";q=40000;w=60`, `"anyMinute";q=10;w=60`, `"rpm";q=60;w=60, "rpd";q=1000;w=86400`
	)
	inTokens := []httplimit.Limit{{Limit: llmTokens, Key: user, Unit: "tokens"}}
	both := []httplimit.Limit{{Limit: rpm, Key: user}, {Limit: rpd, Key: user}}
	over := ratelimit.Define("over", ratelimit.TokenBucket{Rate: 100, Period: time.Minute, Capacity: 300})
	overWindow := ratelimit.Define("over", ratelimit.FixedWindow{Rate: 100, Period: time.Hour, Capacity: 300, Start: ten})
	late, at40 := 59*time.Minute+57300*time.Millisecond, 40*time.Minute
	for name, e := range map[string]example{
		"TB-A1":                           {one(sendMessage), 0, 0, 1, 200, message, `"sendMessage";r=2;t=12`, ""},
		"TB-A2 the last token":            {one(sendMessage), 1.8, 0, 1, 200, message, `"sendMessage";r=0;t=5`, ""},
		"TB-A3 a cost and a unit":         {inTokens, 0, 0, 8500, 200, tokens + `;qu="tokens"`, `"llmTokens";r=31500;t=48`, ""},
		"TB-A4 no more than the quota":    {one(over), 0, 0, 1, 200, `"over";q=100;w=60`, `"over";r=100;t=60`, ""},
		"TB-R1":                           {one(sendMessage), 2.8, 0, 1, 429, message, `"sendMessage";r=0;t=5`, "5"},
		"TB-R2 some left, and not enough": {one(llmTokens), 38_500, 0, 8500, 429, tokens, `"llmTokens";r=1500;t=11`, "11"},
		"TB-R3 owed tokens do not show":   {one(sendMessage), 7, 0, 1, 429, message, `"sendMessage";r=0;t=30`, "30"},
		"FW-A1":                           {one(freeTrial), 0, 20 * time.Second, 1, 200, trial, `"freeTrialSignUp";r=99;t=3580`, ""},
		"FW-A2 truthful":                  {one(freeTrial), 40, 59*time.Minute + 50*time.Second, 1, 200, trial, `"freeTrialSignUp";r=59;t=10`, ""},
		"FW-A3":                           {one(freeTrial), 99, at40, 1, 200, trial, `"freeTrialSignUp";r=0;t=1200`, ""},
		"FW-A4 no more than the quota":    {one(overWindow), 0, 0, 1, 200, `"over";q=100;w=3600`, `"over";r=100;t=3600`, ""},
		"FW-R1":                           {one(freeTrial), 100, at40 + time.Second, 1, 429, trial, `"freeTrialSignUp";r=0;t=1199`, "1199"},
		"FW-R2 a part of a second is one": {one(freeTrial), 98, late, 5, 429, trial, `"freeTrialSignUp";r=2;t=3`, "3"},
		"FW-R3 only what refused":         {both, 1000, 4 * time.Hour, 1, 429, two, `"rpd";r=0;t=36000`, "36000"},
		"SW-A1 until there is more":       {one(anyMinute), 4, 0, 1, 200, sliding, `"anyMinute";r=5;t=70`, ""},
		"SW-R1":                           {one(anyMinute), 10, 0, 1, 429, sliding, `"anyMinute";r=0;t=70`, "70"},
		"CW-A1 months have no one length": {one(aMonth), 99, 0, 1, 200, month, `"aMonth";r=900;t=1944000`, ""},
		"CW-R1":                           {one(aMonth), 1000, 0, 1, 429, month, `"aMonth";r=0;t=1944000`, "1944000"},
	} {
		b := setup(t)
		b.clock.Set(ten.Add(e.at))
		last := e.limits[len(e.limits)-1].Limit
		require.NoError(t, b.limiter.Charge(t.Context(), last.For("ada").Cost(e.spent)))
		e.limits[0].Cost = httplimit.FixedCost(e.cost)
		w := do(b.limited(t, limits(e.limits...), respond()), request(t))
		require.Equal(t, e.status, w.Code, name)
		require.Equal(t, e.policy, w.Header().Get("RateLimit-Policy"), name)
		require.Equal(t, e.limit, w.Header().Get("RateLimit"), name)
		require.Equal(t, e.retry, w.Header().Get("Retry-After"), name)
	}
}

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

// TestHeaderFields compares the fields that state limits, in each form, with testdata/fields.txt: before and after the
// last token. No field holds the key.
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
	require.NotContains(t, text.String(), "ada")
	testkit.Golden(t, "fields.txt", text.String())
}

// TestAnswers compares the answers to requests that are not served with testdata/answers.txt: status, fields and body
// in each form. No answer holds the key.
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
		for _, accept := range []string{"application/json", "text/html"} {
			fmt.Fprintf(&text, "== %s, as %s ==\n%s\n", c.name, accept, response(do(c.handler, request(t, "Accept", accept))))
		}
	}
	require.NotContains(t, text.String(), "ada")
	testkit.Golden(t, "answers.txt", text.String())
}

// TestAProxyReplacesTheFieldsOfItsUpstream promises one value of each field that has one number, in any way of
// answering. Lists keep the upstream's members, and a limit in shadow replaces nothing.
func TestAProxyReplacesTheFieldsOfItsUpstream(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for form, prefix := range map[httplimit.Headers]string{
		httplimit.Draft06Headers: "RateLimit-", httplimit.EpochHeaders: "X-RateLimit-",
	} {
		for name, answer := range map[string]func(http.ResponseWriter){
			"WriteHeader": func(w http.ResponseWriter) { w.WriteHeader(http.StatusOK) },
			"Write":       func(w http.ResponseWriter) { _, _ = w.Write([]byte("hello")) },
			"WriteString": func(w http.ResponseWriter) { _, _ = io.WriteString(w, "hello") },
			"ReadFrom":    func(w http.ResponseWriter) { _, _ = io.Copy(w, strings.NewReader("hello")) },
			"Flush":       func(w http.ResponseWriter) { w.(http.Flusher).Flush() },
			"Nothing":     func(http.ResponseWriter) {},
		} {
			config := limits(userLimit)
			config.Headers = form
			w := do(b.limited(t, config, inline(func(e exchange) {
				for _, field := range []string{"Limit", "Remaining", "Reset"} {
					e.w.Header().Add(prefix+field, "5000") // as httputil.ReverseProxy does
				}
				answer(e.w)
			})), request(t))
			for _, field := range []string{"Limit", "Remaining", "Reset"} {
				values := w.Header().Values(prefix + field)
				require.Len(t, values, 1, name)
				require.NotEqual(t, "5000", values[0], name)
			}
			require.NoError(t, b.limiter.Reset(t.Context(), perUser.For("ada")))
		}
	}
	w := do(b.limited(t, limits(userLimit), inline(func(e exchange) { e.w.Header().Add("RateLimit", `"upstream";r=1;t=1`) })), request(t))
	require.Len(t, w.Header().Values("RateLimit"), 2, "it is a list")
}
