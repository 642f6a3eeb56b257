package httplimit_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

var (
	clientMessages = ratelimit.Define("messages", ratelimit.TokenBucket{Rate: 10, Period: time.Minute, Capacity: 3})
	clientUploads  = ratelimit.Define("uploads", ratelimit.FixedWindow{Rate: 5, Period: time.Hour, Start: clientNow.Add(-20 * time.Minute)})
	clientNow      = time.Date(2026, time.March, 2, 0, 0, 0, 0, time.UTC)
)

// clientStateBundle is a handler on a database of its own, where the header User is who signed in.
type clientStateBundle struct {
	pool    *pgxpool.Pool
	limiter *ratelimit.Limiter
	handler http.Handler
	log     *bytes.Buffer
}

func setupClientState(t *testing.T) *clientStateBundle {
	t.Helper()
	b := &clientStateBundle{pool: postgrestest.New(t), log: &bytes.Buffer{}}
	var err error
	b.limiter, err = ratelimit.New(b.pool, ratelimit.Config{AsOf: func() time.Time { return clientNow }})
	require.NoError(t, err)
	b.handler, err = httplimit.NewClientState(httplimit.ClientStateConfig{
		Limiter: b.limiter,
		Key: func(r *http.Request) (string, error) {
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
		},
		Limits: []ratelimit.Limit{clientUploads, clientMessages},
		Logger: slog.New(slog.NewTextHandler(b.log, nil)),
	})
	require.NoError(t, err)
	return b
}

// ask returns the answer to user.
func (b *clientStateBundle) ask(ctx context.Context, method, user string) *httptest.ResponseRecorder {
	r := httptest.NewRequestWithContext(ctx, method, "/limits?key=bob&limit=others", strings.NewReader("key=bob"))
	r.Header.Set("User", user)
	w := httptest.NewRecorder()
	b.handler.ServeHTTP(w, r)
	return w
}

func TestClientState(t *testing.T) {
	t.Parallel()

	t.Run("TellsCallersTheStateOfTheirOwnLimits", func(t *testing.T) {
		t.Parallel()
		b := setupClientState(t)
		_, err := b.limiter.Take(t.Context(), clientMessages.For("alice").Cost(2.5), clientUploads.For("alice").Cost(1), clientMessages.For("bob"))
		require.NoError(t, err)
		got := b.ask(t.Context(), http.MethodGet, "alice")
		require.Equal(t, http.StatusOK, got.Code)
		require.JSONEq(t, `{"limits": [
			{"limit": "uploads", "kind": "fixed window", "rate": 5, "period_us": 3600000000, "start_us": 2400000000,
			 "capacity": 5, "value": 4, "ts_us": 1772408400000000, "now_us": 1772409600000000},
			{"limit": "messages", "kind": "token bucket", "rate": 10, "period_us": 60000000,
			 "capacity": 3, "value": 0.5, "ts_us": 1772409600000000, "now_us": 1772409600000000}]}`, got.Body.String())
		require.NotContains(t, got.Body.String(), "alice")
	})
	t.Run("KnowsALongKeyAsTheMiddlewareDoes", func(t *testing.T) {
		t.Parallel()
		b := setupClientState(t)
		long := strings.Repeat("alice", 100)
		key := func(*http.Request) (string, error) { return long, nil }
		middleware, err := httplimit.New(b.limiter, limits(httplimit.Limit{Limit: clientUploads, Key: key}))
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, do(middleware(respond()), request(t)).Code)
		require.Contains(t, b.ask(t.Context(), http.MethodGet, long).Body.String(), `"value":4`)
	})
	t.Run("TellsOfAFullBucketThatWasNeverUsed", func(t *testing.T) {
		t.Parallel()
		var body struct {
			Limits []struct{ Value, Capacity float64 } `json:"limits"`
		}
		require.NoError(t, json.Unmarshal(setupClientState(t).ask(t.Context(), http.MethodGet, "carol").Body.Bytes(), &body))
		require.Len(t, body.Limits, 2)
		for _, limit := range body.Limits {
			require.Equal(t, limit.Capacity, limit.Value)
		}
	})
	t.Run("TakesAndWritesNothing", func(t *testing.T) {
		t.Parallel()
		b := setupClientState(t)
		for range 10 {
			require.Equal(t, http.StatusOK, b.ask(t.Context(), http.MethodGet, "alice").Code)
		}
		var rows int
		require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT count(*) FROM ratelimit.buckets").Scan(&rows))
		require.Zero(t, rows)
	})
	t.Run("IsNotStoredAndNotReadByOtherOrigins", func(t *testing.T) {
		t.Parallel()
		b := setupClientState(t)
		for _, user := range []string{"alice", "nobody", "broken"} {
			header := b.ask(t.Context(), http.MethodGet, user).Header()
			require.Equal(t, "no-store", header.Get("Cache-Control"))
			require.Equal(t, "Cookie, Authorization", header.Get("Vary"))
			require.Equal(t, "nosniff", header.Get("X-Content-Type-Options"))
			require.Equal(t, "same-origin", header.Get("Cross-Origin-Resource-Policy"))
			require.Empty(t, header.Get("Access-Control-Allow-Origin"))
		}
	})
}

func TestClientStateFailures(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		method, user string
		status       int
		log          string
	}{
		"RefusesWhoIsNotSignedIn":      {http.MethodGet, "nobody", http.StatusForbidden, ""},
		"RefusesAnEmptyKey":            {http.MethodGet, "", http.StatusForbidden, ""},
		"RefusesABadKey":               {http.MethodGet, "forged", http.StatusForbidden, ""},
		"IsUnavailableWhenTheKeyFails": {http.MethodGet, "broken", http.StatusServiceUnavailable, "sessions"},
		"OnlyReads":                    {http.MethodPost, "alice", http.StatusMethodNotAllowed, ""},
		"IsNoPreflight":                {http.MethodOptions, "alice", http.StatusMethodNotAllowed, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setupClientState(t)
			got := b.ask(t.Context(), test.method, test.user)
			require.Equal(t, test.status, got.Code)
			require.Equal(t, "application/problem+json", got.Header().Get("Content-Type"))
			require.NotContains(t, got.Body.String(), "limits")
			require.Contains(t, b.log.String(), test.log)
			require.Equal(t, test.log == "", b.log.Len() == 0)
			require.NotContains(t, b.log.String(), "hunter2")
		})
	}
	t.Run("IsUnavailableWithoutTheStore", func(t *testing.T) {
		t.Parallel()
		b := setupClientState(t)
		b.pool.Close()
		got := b.ask(t.Context(), http.MethodGet, "alice")
		require.Equal(t, http.StatusServiceUnavailable, got.Code)
		require.Equal(t, "5", got.Header().Get("Retry-After"))
		require.JSONEq(t, `{"title": "Service Unavailable", "status": 503}`, got.Body.String())
		require.Contains(t, b.log.String(), "closed pool")
		require.NotContains(t, b.log.String(), "alice")
	})
	t.Run("IsUnavailableWhenTheStoreHangs", func(t *testing.T) {
		t.Parallel()
		b := setupClientState(t)
		tx, err := b.pool.Begin(t.Context())
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), "LOCK TABLE ratelimit.buckets IN ACCESS EXCLUSIVE MODE")
		require.NoError(t, err)
		handler, err := httplimit.NewClientState(httplimit.ClientStateConfig{
			Limiter: b.limiter,
			Key:     func(*http.Request) (string, error) { return "alice", nil },
			Limits:  []ratelimit.Limit{clientUploads},
			Timeout: 50 * time.Millisecond,
			Logger:  slog.New(slog.DiscardHandler),
		})
		require.NoError(t, err)
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/limits", nil))
		require.Equal(t, http.StatusServiceUnavailable, w.Code)
		require.NoError(t, tx.Rollback(t.Context()))
	})
	t.Run("SaysNothingOfCallersThatLeave", func(t *testing.T) {
		t.Parallel()
		b := setupClientState(t)
		ctx, leave := context.WithCancel(t.Context())
		leave()
		require.Equal(t, http.StatusServiceUnavailable, b.ask(ctx, http.MethodGet, "alice").Code)
		require.Empty(t, b.log.String())
	})
}

func TestNewClientState(t *testing.T) {
	t.Parallel()
	limiter, err := ratelimit.New(new(pgxpool.Pool), ratelimit.Config{}) // it makes no connection
	require.NoError(t, err)
	valid := httplimit.ClientStateConfig{
		Limiter: limiter,
		Key:     func(*http.Request) (string, error) { return "alice", nil },
		Limits:  []ratelimit.Limit{clientUploads, clientMessages},
	}
	_, err = httplimit.NewClientState(valid)
	require.NoError(t, err)
	for want, change := range map[string]func(*httplimit.ClientStateConfig){
		"no Limiter":             func(c *httplimit.ClientStateConfig) { c.Limiter = nil },
		"bound to a transaction": func(c *httplimit.ClientStateConfig) { c.Limiter = c.Limiter.WithTx(nil) },
		"no Key":                 func(c *httplimit.ClientStateConfig) { c.Key = nil },
		"0 Limits":               func(c *httplimit.ClientStateConfig) { c.Limits = nil },
		"65 Limits":              func(c *httplimit.ClientStateConfig) { c.Limits = make([]ratelimit.Limit, 65) },
		"zero Limit":             func(c *httplimit.ClientStateConfig) { c.Limits = []ratelimit.Limit{clientUploads, {}} },
		`are called "uploads"`:   func(c *httplimit.ClientStateConfig) { c.Limits = []ratelimit.Limit{clientUploads, clientUploads} },
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
	b := setupClientState(t)
	limits := []ratelimit.Limit{
		ratelimit.Define("anyMinute", ratelimit.SlidingWindow{Rate: 10, Period: time.Minute, Slices: 6}),
		ratelimit.Define("aMonth", ratelimit.CalendarWindow{Rate: 1000, Resets: ratelimit.Monthly, Zone: "Europe/Berlin"}),
		ratelimit.Define("slots", ratelimit.Concurrency{Most: 3, Lease: time.Minute}),
	}
	handler, err := httplimit.NewClientState(httplimit.ClientStateConfig{
		Limiter: b.limiter, Limits: limits, Key: func(*http.Request) (string, error) { return "ada", nil }, Timeout: time.Hour,
	})
	require.NoError(t, err)
	lease, err := b.limiter.Acquire(t.Context(), limits[2].For("ada").Cost(2), limits[0].For("ada").Cost(4), limits[1].For("ada"))
	require.NoError(t, err)
	require.True(t, lease.Allowed)

	w := httptest.NewRecorder()
	handler.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", http.NoBody))
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
	ends := float64(clientNow.Add(time.Minute).UnixMicro())
	require.Equal(t, map[string]any{
		"limit": "slots", "kind": "concurrency", "capacity": 3.0, "lease_us": 60e6, "ends_us": []any{ends, ends},
		"ts_us": float64(clientNow.UnixMicro()), "now_us": float64(clientNow.UnixMicro()),
	}, state.Limits[2])
}
