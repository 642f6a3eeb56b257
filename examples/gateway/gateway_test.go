package main

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAPI(t *testing.T) {
	t.Parallel()

	t.Run("ChargesWhatTheHeaderStates", func(t *testing.T) {
		t.Parallel()
		url := serveGateway(t, new(upstream))
		for _, test := range []struct {
			stated  string
			charged int
		}{{"", 1}, {"7", 7}, {"100", 100}, {"101", maxCost}, {"1e9", maxCost}, {"-5", 1}, {"seven", 1}} {
			got := get(t, url+"/v1/x", map[string]string{"Authorization": "Bearer pro-key", costHeader: test.stated})
			require.Equal(t, http.StatusOK, got.status, got.body)
			require.JSONEq(t, fmt.Sprintf(`{"path": "/v1/x", "tokens": %d}`, test.charged), got.body, test.stated)
		}
	})

	t.Run("StatesWhatIsLeftOfEveryTierButTheOneOnTrial", func(t *testing.T) {
		t.Parallel()
		url := serveGateway(t, new(upstream))
		got := get(t, url+"/v1/x", nil)
		policies, left := got.header.Get("RateLimit-Policy"), got.header.Get("RateLimit")
		for _, limit := range []string{`"gateway.address"`, `"gateway.key"`, `"gateway.all"`} {
			require.Contains(t, policies, limit)
			require.Contains(t, left, limit)
		}
		require.NotContains(t, policies+left, "gateway.daily")
		require.Contains(t, left, `"gateway.key";r=59`)
	})

	t.Run("HandsNoSecretsOn", func(t *testing.T) {
		t.Parallel()
		url := serveGateway(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_ = json.NewEncoder(w).Encode(r.Header)
		}))
		got := get(t, url+"/v1/x", map[string]string{"Authorization": "Bearer free-key", "Cookie": "a=b"})
		require.NotContains(t, got.body, "free-key")
		require.NotContains(t, got.body, "a=b")
	})

	t.Run("RefusesKeysThatNobodyHasAtTheCostOfTheirAddress", func(t *testing.T) {
		t.Parallel()
		served := new(upstream)
		url := serveGateway(t, served)
		got := get(t, url+"/v1/x", map[string]string{"Authorization": "Bearer guess"})
		require.Equal(t, http.StatusUnauthorized, got.status)
		require.Equal(t, "Bearer", got.header.Get("WWW-Authenticate"))
		require.Contains(t, got.header.Get("RateLimit"), `"gateway.address";r=119`)
		require.NotContains(t, got.header.Get("RateLimit"), "gateway.all")
		require.Zero(t, served.requests.Load())
	})

	t.Run("TellsTheUpstreamTheCostThoughNothingWasDecided", func(t *testing.T) {
		t.Parallel()
		upstream, err := url.Parse(serveBehind(t, new(upstream)))
		require.NoError(t, err)
		g := &gateway{config: config{log: slog.New(slog.DiscardHandler)}}
		server := httptest.NewServer(stateCost(g.proxy(upstream)))
		t.Cleanup(server.Close)
		got := get(t, server.URL+"/v1/x", map[string]string{costHeader: "1000000"})
		require.JSONEq(t, `{"path": "/v1/x", "tokens": 100}`, got.body)
	})

	t.Run("StatesItsOwnLimitsAndNotTheUpstreams", func(t *testing.T) {
		t.Parallel()
		got := get(t, serveGateway(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("RateLimit", `"upstream";r=1;t=1`)
			w.Header().Set("RateLimit-Policy", `"upstream";q=1;w=1`)
		}))+"/v1/x", nil)
		require.Len(t, got.header.Values("RateLimit"), 1)
		require.Len(t, got.header.Values("RateLimit-Policy"), 1)
		require.NotContains(t, got.header.Get("RateLimit"), "upstream")
	})

	t.Run("KeepsWhatDependsOnTheCallerOutOfCaches", func(t *testing.T) {
		t.Parallel()
		url := serveGateway(t, new(upstream))
		for _, path := range []string{"/", "/limits"} {
			require.Regexp(t, "private|no-store", get(t, url+path, nil).header.Get("Cache-Control"), path)
		}
	})

	t.Run("SaysThatTheUpstreamIsDown", func(t *testing.T) {
		t.Parallel()
		got := get(t, serveGatewayBefore(t, "http://127.0.0.1:1")+"/v1/x", nil)
		require.Equal(t, http.StatusBadGateway, got.status)
	})
}

func TestLimits(t *testing.T) {
	t.Parallel()
	url := serveGateway(t, new(upstream))
	for name, test := range map[string]struct {
		authorization string
		status        int
		rate          int
	}{
		"OfAVisitor":  {"", http.StatusOK, 60},
		"OfAFreeKey":  {"Bearer free-key", http.StatusOK, 60},
		"OfAProKey":   {"Bearer pro-key", http.StatusOK, 600},
		"OfAStranger": {"Bearer guess", http.StatusUnauthorized, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fields := map[string]string{}
			if test.authorization != "" {
				fields["Authorization"] = test.authorization
			}
			got := get(t, url+"/limits", fields)
			require.Equal(t, test.status, got.status, got.body)
			if test.rate > 0 {
				require.Contains(t, got.body, fmt.Sprintf(`"limit":"gateway.key","kind":"token bucket","rate":%d,`, test.rate))
			}
		})
	}
}
