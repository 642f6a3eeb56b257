package httplimit_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// signedInUser is the key of the header User: who has signed in.
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

// clientState returns the handler for windowed and sendMessage, on a limiter.
func (b *bundle) clientState(t *testing.T, limiter *ratelimit.Limiter, timeout time.Duration) http.Handler {
	t.Helper()
	handler, err := httplimit.NewClientState(httplimit.ClientStateConfig{
		Limiter: limiter, Key: signedInUser, Limits: []ratelimit.Limit{windowed, sendMessage}, Timeout: timeout,
		Logger: slog.New(slog.NewTextHandler(b.log, nil)),
	})
	require.NoError(t, err)
	return handler
}

// askState returns the answer to a user. The rest of the request tries to read the state of others.
func askState(ctx context.Context, handler http.Handler, method, user string) *httptest.ResponseRecorder {
	r := httptest.NewRequestWithContext(ctx, method, "/limits?key=bob&limit=others", strings.NewReader("key=bob"))
	r.Header.Set("User", user)
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

func TestClientState(t *testing.T) {
	t.Parallel()
	b := setup(t)
	handler := b.clientState(t, b.limiter, 0)
	long := strings.Repeat("long", 100)
	middleware := b.limited(t, limits(httplimit.Limit{Limit: windowed, Key: signedInUser}), respond())
	require.Equal(t, http.StatusOK, askState(t.Context(), middleware, http.MethodGet, long).Code)
	_, err := b.limiter.Take(t.Context(), sendMessage.For("alice").Cost(2.5), windowed.For("alice").Cost(1), sendMessage.For("bob"))
	require.NoError(t, err)
	for range 3 { // which takes nothing
		got := askState(t.Context(), handler, http.MethodGet, "alice")
		require.Equal(t, http.StatusOK, got.Code)
		requireStateHeaders(t, got.Header())
		require.JSONEq(t, `{"limits": [
			{"limit": "windowed", "kind": "fixed window", "rate": 10, "period_us": 3600000000,
			 "capacity": 10, "value": 9, "ts_us": 1773050400000000, "now_us": 1773050400000000},
			{"limit": "sendMessage", "kind": "token bucket", "rate": 10, "period_us": 60000000,
			 "capacity": 3, "value": 0.5, "ts_us": 1773050400000000, "now_us": 1773050400000000}]}`, got.Body.String())
	}
	require.Contains(t, askState(t.Context(), handler, http.MethodGet, long).Body.String(), `"value":9,`, "the key of the middleware")
	require.Contains(t, askState(t.Context(), handler, http.MethodGet, "carol").Body.String(), `"value":10,`, "a new key")
}

func TestClientStateFailures(t *testing.T) {
	t.Parallel()
	gone, leave := context.WithCancel(t.Context())
	leave()
	for name, test := range map[string]struct {
		method, user string
		status       int
		log          string
		change       func(t *testing.T, b *bundle) http.Handler // nil: the store works
		ctx          context.Context                            //nolint:containedctx // of the request
	}{
		"RefusesWhoIsNotSignedIn":      {method: http.MethodGet, user: "nobody", status: http.StatusForbidden},
		"RefusesAnEmptyKey":            {method: http.MethodGet, user: "", status: http.StatusForbidden},
		"RefusesABadKey":               {method: http.MethodGet, user: "forged", status: http.StatusForbidden},
		"IsUnavailableWhenTheKeyFails": {method: http.MethodGet, user: "broken", status: http.StatusServiceUnavailable, log: "sessions"},
		"OnlyReads":                    {method: http.MethodPost, user: "alice", status: http.StatusMethodNotAllowed},
		"IsNoPreflight":                {method: http.MethodOptions, user: "alice", status: http.StatusMethodNotAllowed},
		"IsUnavailableWithoutTheStore": {
			method: http.MethodGet, user: "alice", status: http.StatusServiceUnavailable, log: "closed pool",
			change: func(t *testing.T, b *bundle) http.Handler { t.Helper(); return b.clientState(t, b.down(t), 0) },
		},
		"IsUnavailableWhenTheStoreHangs": {
			method: http.MethodGet, user: "alice", status: http.StatusServiceUnavailable, log: "deadline",
			change: func(t *testing.T, b *bundle) http.Handler { t.Helper(); return b.clientState(t, b.limiter, 1) },
		},
		"SaysNothingOfCallersThatLeave": {method: http.MethodGet, user: "alice", status: http.StatusServiceUnavailable, ctx: gone},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			handler := b.clientState(t, b.limiter, 0)
			if test.change != nil {
				handler = test.change(t, b)
			}
			ctx := test.ctx
			if ctx == nil {
				ctx = t.Context()
			}
			got := askState(ctx, handler, test.method, test.user)
			require.Equal(t, test.status, got.Code)
			requireStateHeaders(t, got.Header())
			require.Equal(t, "application/problem+json", got.Header().Get("Content-Type"))
			require.Equal(t, test.status == http.StatusServiceUnavailable, got.Header().Get("Retry-After") == "5")
			require.NotContains(t, got.Body.String(), "limits")
			require.Contains(t, b.log.String(), test.log)
			require.Equal(t, test.log == "", b.log.String() == "")
			require.NotContains(t, b.log.String(), "hunter2")
			require.NotContains(t, b.log.String(), "alice")
		})
	}
}

func TestNewClientState(t *testing.T) {
	t.Parallel()
	valid := httplimit.ClientStateConfig{
		Limiter: setup(t).limiter, Key: signedInUser, Limits: []ratelimit.Limit{windowed, sendMessage},
	}
	for want, change := range map[string]func(*httplimit.ClientStateConfig){
		"limiter is nil":         func(c *httplimit.ClientStateConfig) { c.Limiter = nil },
		"bound to a transaction": func(c *httplimit.ClientStateConfig) { c.Limiter = c.Limiter.WithTx(nil) },
		"no Key":                 func(c *httplimit.ClientStateConfig) { c.Key = nil },
		"0 Limits":               func(c *httplimit.ClientStateConfig) { c.Limits = nil },
		"65 Limits":              func(c *httplimit.ClientStateConfig) { c.Limits = make([]ratelimit.Limit, 65) },
		"zero Limit":             func(c *httplimit.ClientStateConfig) { c.Limits = []ratelimit.Limit{windowed, {}} },
		`are called "windowed"`:  func(c *httplimit.ClientStateConfig) { c.Limits = []ratelimit.Limit{windowed, windowed} },
		`limit "adaptive" is Adaptive`: func(c *httplimit.ClientStateConfig) {
			c.Limits = []ratelimit.Limit{ratelimit.Define("adaptive", ratelimit.Adaptive{Contract: ratelimit.PerSecond(9)})}
		},
		`limit "sharded" has Shards`: func(c *httplimit.ClientStateConfig) {
			c.Limits = []ratelimit.Limit{ratelimit.Define("sharded", ratelimit.TokenBucket{Rate: 8, Period: time.Hour, Shards: 4})}
		},
		`limit "shardedWindow" has Shards`: func(c *httplimit.ClientStateConfig) {
			c.Limits = []ratelimit.Limit{ratelimit.Define("shardedWindow", &ratelimit.FixedWindow{Rate: 8, Period: time.Hour, Shards: 2})}
		},
		"Timeout is -1ns; use a": func(c *httplimit.ClientStateConfig) { c.Timeout = -1 },
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			config := valid
			change(&config)
			_, err := httplimit.NewClientState(config)
			require.ErrorIs(t, err, ratelimit.ErrInvalidConfig)
			require.ErrorContains(t, err, want)
		})
	}
}

// TestClientStateOfEachKind tells the state of windows that slide, of the calendar and of slots, so that a page can compute
// them, and nothing by which a slot could be released.
func TestClientStateOfEachKind(t *testing.T) {
	t.Parallel()
	b := setup(t)
	limits := []ratelimit.Limit{anyMinute, aMonth, slots}
	handler, err := httplimit.NewClientState(httplimit.ClientStateConfig{
		Limiter: b.limiter, Limits: limits, Key: user, Timeout: time.Hour,
	})
	require.NoError(t, err)
	lease, err := b.limiter.Acquire(t.Context(), limits[2].For("ada").Cost(2), limits[0].For("ada").Cost(4), limits[1].For("ada"))
	require.NoError(t, err)
	require.True(t, lease.Allowed)

	w := do(handler, request(t))
	require.Equal(t, http.StatusOK, w.Code)
	var state struct {
		Limits []map[string]any `json:"limits"`
	}
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &state))
	require.Len(t, state.Limits, 3)
	require.Equal(t, "sliding window", state.Limits[0]["kind"])
	require.Equal(t, []any{4.0, 0.0}, state.Limits[0]["totals"])
	require.Equal(t, "calendar window", state.Limits[1]["kind"])
	require.Equal(t, 999.0, state.Limits[1]["value"])
	until := time.Date(2026, time.March, 31, 22, 0, 0, 0, time.UTC) // and April begins in Berlin
	require.Equal(t, float64(until.UnixMicro()), state.Limits[1]["windows"].([]any)[0].(map[string]any)["until_us"])
	ends := float64(ten.Add(time.Minute).UnixMicro())
	require.Equal(t, map[string]any{
		"limit": "slots", "kind": "concurrency", "capacity": 3.0, "lease_us": 60e6, "ends_us": []any{ends, ends},
		"ts_us": float64(ten.UnixMicro()), "now_us": float64(ten.UnixMicro()),
	}, state.Limits[2])
}
