package httplimit_test

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// signedInUser is the key of the header User, and the errors of a sign-in.
func signedInUser(r *http.Request) (string, error) {
	switch user := r.Header.Get("User"); user {
	case "nobody":
		return "", httplimit.ErrNoKey
	case "forged":
		return "", httplimit.ErrBadKey
	case "broken":
		return "", errors.New("the sessions cannot be read: postgres://site:hunter2@db.test/sessions")
	default:
		return user, nil
	}
}

// clientState returns the handler for limits, by user and plan.
func (b *bundle) clientState(t *testing.T, limiter *ratelimit.Limiter, timeout time.Duration, limits ...ratelimit.Limit) http.Handler {
	t.Helper()
	handler, err := httplimit.NewClientState(httplimit.ClientStateConfig{
		Limiter: limiter, Key: signedInUser, Plan: httplimit.Header("X-Plan"), Limits: limits, Timeout: timeout,
		Logger: slog.New(slog.NewTextHandler(b.log, nil)),
	})
	require.NoError(t, err)
	return handler
}

// askState returns the answer to a user. The rest of the request tries to read the state of others.
func askState(ctx context.Context, handler http.Handler, method, user string, plans ...string) *httptest.ResponseRecorder {
	r := httptest.NewRequestWithContext(ctx, method, "/limits?key=bob&limit=others", strings.NewReader("key=bob"))
	r.Header.Set("User", user)
	r.Header["X-Plan"] = plans
	return do(handler, r)
}

// requireStateHeaders requires that an answer is stored nowhere, and that pages of other origins cannot read it.
func requireStateHeaders(t *testing.T, header http.Header) {
	t.Helper()
	require.Equal(t, "no-store", header.Get("Cache-Control"))
	require.Equal(t, "Cookie, Authorization", header.Get("Vary"))
	require.Equal(t, "nosniff", header.Get("X-Content-Type-Options"))
	require.Equal(t, "same-origin", header.Get("Cross-Origin-Resource-Policy"))
	require.Empty(t, header.Get("Access-Control-Allow-Origin"))
}

// bucketState is the state of a limit at ten.
func bucketState(limit, numbers string) string {
	return `{"limit": "` + limit + `", ` + numbers + `, "ts_us": 1773050400000000, "now_us": 1773050400000000}`
}

const windowedNumbers = `"kind": "fixed window", "rate": 10, "period_us": 3600000000, "capacity": 10, "value": `

func TestClientState(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handler := b.clientState(t, b.limiter, 0, windowed, sendMessage)
	long := strings.Repeat("long", 100)
	middleware := b.limited(t, limits(httplimit.Limit{Limit: windowed, Key: signedInUser}), respond())
	require.Equal(t, http.StatusOK, askState(t.Context(), middleware, http.MethodGet, long).Code)
	_, err := b.limiter.Take(t.Context(), sendMessage.For("alice").Cost(2.5), windowed.For("alice").Cost(1), sendMessage.For("bob"))
	require.NoError(t, err)
	for range 3 { // which takes nothing
		got := askState(t.Context(), handler, http.MethodGet, "alice")
		require.Equal(t, http.StatusOK, got.Code)
		requireStateHeaders(t, got.Header())
		message := `"kind": "token bucket", "rate": 10, "period_us": 60000000, "capacity": 3, "value": 0.5`
		require.JSONEq(t, `{"limits": [`+bucketState("windowed", windowedNumbers+"9")+`, `+bucketState("sendMessage", message)+`]}`, got.Body.String())
	}
	require.Contains(t, askState(t.Context(), handler, http.MethodGet, long).Body.String(), `"value":9,`, "the key of the middleware")
	require.Contains(t, askState(t.Context(), handler, http.MethodGet, "carol").Body.String(), `"value":10,`, "a new key")
}

func TestClientStateFailures(t *testing.T) {
	t.Parallel()
	b := setup(t)
	works, down, hangs := b.clientState(t, b.limiter, 0, windowed), b.clientState(t, b.down(t), 0, windowed), b.clientState(t, b.limiter, 1, windowed)
	for name, test := range map[string]struct {
		handler      http.Handler
		method, user string
		plans        []string
		status       int
		log          string
	}{
		"not signed in": {works, http.MethodGet, "nobody", nil, http.StatusForbidden, ""},
		"an empty key":  {works, http.MethodGet, "", nil, http.StatusForbidden, ""},
		"a bad key":     {works, http.MethodGet, "forged", nil, http.StatusForbidden, ""},
		"two plans":     {works, http.MethodGet, "alice", []string{"pro", "free"}, http.StatusForbidden, ""},
		"the key fails": {works, http.MethodGet, "broken", nil, http.StatusServiceUnavailable, "sessions"},
		"a POST":        {works, http.MethodPost, "alice", nil, http.StatusMethodNotAllowed, ""},
		"a preflight":   {works, http.MethodOptions, "alice", nil, http.StatusMethodNotAllowed, ""},
		"store down":    {down, http.MethodGet, "alice", nil, http.StatusServiceUnavailable, "closed pool"},
		"store hangs":   {hangs, http.MethodGet, "alice", nil, http.StatusServiceUnavailable, "deadline"},
	} {
		logged := len(b.log.String())
		got := askState(t.Context(), test.handler, test.method, test.user, test.plans...)
		require.Equal(t, test.status, got.Code, name)
		requireStateHeaders(t, got.Header())
		require.Equal(t, "application/problem+json", got.Header().Get("Content-Type"), name)
		require.Equal(t, test.status == http.StatusServiceUnavailable, got.Header().Get("Retry-After") == "5", name)
		require.NotContains(t, got.Body.String(), "limits", name)
		log := b.log.String()[logged:]
		require.Contains(t, log, test.log, name)
		require.Equal(t, test.log == "", log == "", name)
		require.NotContains(t, log, "hunter2")
		require.NotContains(t, log, "alice")
	}
}

// TestClientStateInAnOutage promises that polls of many clients do not flood the log.
func TestClientStateInAnOutage(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handler := b.clientState(t, b.down(t), 0, windowed)
	for range 20 {
		require.Equal(t, http.StatusServiceUnavailable, askState(t.Context(), handler, http.MethodGet, "alice").Code)
	}
	require.Less(t, strings.Count(b.log.String(), "could not be read"), 10)
	require.Contains(t, b.log.String(), "error_type=")
}

func TestNewClientState(t *testing.T) {
	t.Parallel()
	b := setup(t)
	valid := httplimit.ClientStateConfig{Limiter: b.limiter, Key: signedInUser, Limits: []ratelimit.Limit{windowed}}
	with := func(limits ...ratelimit.Limit) httplimit.ClientStateConfig {
		c := valid
		c.Limits = limits
		return c
	}
	withoutKey, bound, early, none := valid, valid, valid, valid
	withoutKey.Key, bound.Limiter, early.Timeout, none.Limiter = nil, b.limiter.WithTx(nil), -1, nil
	for want, config := range map[string]httplimit.ClientStateConfig{
		"limiter is nil":                   none,
		"bound to a transaction":           bound,
		"no Key":                           withoutKey,
		"0 Limits":                         with(),
		"65 Limits":                        with(make([]ratelimit.Limit, 65)...),
		"zero Limit":                       with(windowed, ratelimit.Limit{}),
		`are called "windowed"`:            with(windowed, windowed),
		`limit "sharded" has Shards`:       with(ratelimit.Define("sharded", ratelimit.TokenBucket{Rate: 8, Period: time.Hour, Shards: 4})),
		`limit "shardedWindow" has Shards`: with(ratelimit.Define("shardedWindow", ratelimit.FixedWindow{Rate: 8, Period: time.Hour, Shards: 2})),
		"Timeout is -1ns; use a":           early,
	} {
		_, err := httplimit.NewClientState(config)
		require.ErrorIs(t, err, ratelimit.ErrInvalidConfig, want)
		require.ErrorContains(t, err, want)
	}
}

// TestClientStateOfEachKind promises the state of windows that slide, of the calendar and of slots, so that a page can
// compute them, and nothing by which a slot could be released.
func TestClientStateOfEachKind(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, err := b.limiter.Acquire(t.Context(), slots.For("ada").Cost(2), anyMinute.For("ada").Cost(4), aMonth.For("ada"))
	require.NoError(t, err)
	got := askState(t.Context(), b.clientState(t, b.limiter, time.Hour, anyMinute, aMonth, slots), http.MethodGet, "ada").Body.String()
	require.Contains(t, got, `"kind":"sliding window"`)
	require.Contains(t, got, `"totals":[4,0]`)
	require.Contains(t, got, `"kind":"calendar window"`)
	require.Contains(t, got, `"value":999`)
	require.Contains(t, got, `"until_us":1774994400000000`, "April begins in Berlin")
	require.Contains(t, got, `{"limit":"slots","kind":"concurrency","capacity":3,"lease_us":60000000,`+
		`"ends_us":[1773050460000000,1773050460000000],"ts_us":1773050400000000,"now_us":1773050400000000}`)
}

// TestClientStateOfRules promises the policy of the caller's plan at the time of the request, and a state without the
// limits that are off, in shadow mode, paused or sharded, but with all others.
func TestClientStateOfRules(t *testing.T) {
	t.Parallel()
	b, s := setupStored(t)
	handler := b.clientState(t, b.limiter, 0, perUser, perPlan, windowed, rpm)
	state := func(plan string) string {
		return askState(t.Context(), handler, http.MethodGet, "ada", plan).Body.String()
	}
	s.set(t, perPlan, "", mode(ratelimit.Off))
	s.set(t, rpm, "", mode(ratelimit.Shadow))
	s.set(t, perUser, "pro", of(ratelimit.FixedWindow{Rate: 7, Period: time.Hour, Start: ten}))
	window, rest := bucketState("windowed", windowedNumbers+"10"), `"left_out": ["perPlan", "rpm"]}`
	code := bucketState("perUser", `"kind": "token bucket", "rate": 3, "period_us": 60000000, "capacity": 3, "value": 3`)
	pro := bucketState("perUser", `"kind": "fixed window", "rate": 7, "period_us": 3600000000, "capacity": 7, "value": 7`)
	require.JSONEq(t, `{"limits": [`+code+`, `+window+`], `+rest, state("free"))
	require.JSONEq(t, `{"limits": [`+pro+`, `+window+`], `+rest, state("pro"))
	s.set(t, perUser, "free", of(ratelimit.TokenBucket{Rate: 3, Period: time.Minute, Shards: 4}))
	without := `{"limits": [` + window + `], "left_out": ["perUser", "perPlan", "rpm"]}`
	require.JSONEq(t, without, state("free"), "of rows a page could only have the sum")
	s[storedKey{"perUser", "pro"}] = s.RulingFor(perUser, "pro", "").Paused(ten.Add(time.Minute), "")
	require.JSONEq(t, without, state("pro"))
	b.clock.Set(ten.Add(time.Minute))
	require.Contains(t, state("pro"), `"left_out":["perPlan","rpm"]`)
	alone := b.clientState(t, b.limiter, 0, perPlan)
	require.JSONEq(t, `{"limits": [], "left_out": ["perPlan"]}`, askState(t.Context(), alone, http.MethodGet, "ada").Body.String())
}
