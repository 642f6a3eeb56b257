package main

import (
	"context"
	"encoding/base64"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/integration_test/browsertest"
	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/refusals"
)

// as returns the field of who gives a name and a password.
func as(name, password string) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(name+":"+password))
}

func TestAdmin(t *testing.T) {
	t.Parallel()
	url := serveGateway(t, new(upstream))

	t.Run("AsksForAPassword", func(t *testing.T) {
		t.Parallel()
		for _, authorization := range []string{"", as("ana", ""), as("ana", "Look"), as("look", "ana"), "Bearer pro-key", "Basic look"} {
			for _, path := range []string{"/admin/", "/admin/limit?name=gateway.key", "/admin/playground/"} {
				got := get(t, url+path, map[string]string{"Authorization": authorization})
				require.Equal(t, http.StatusUnauthorized, got.status, authorization)
				require.Contains(t, got.header.Get("WWW-Authenticate"), "Basic")
				require.NotContains(t, got.body, "gateway.key")
			}
		}
		_, err := operators{}.authorize(httptest.NewRequest(http.MethodGet, "/admin/", http.NoBody))
		require.ErrorIs(t, err, errStranger, "with no passwords nobody may")
		made := newOperators()
		require.NotEqual(t, made.look, made.change)
	})

	t.Run("MayOnlyBeLookedAt", func(t *testing.T) {
		t.Parallel()
		got := get(t, url+"/admin/", map[string]string{"Authorization": as("ben", "look")})
		require.Equal(t, http.StatusOK, got.status)
		for _, text := range []string{"gateway.key", "gateway.all", "gateway.address", "ben", "read-only"} {
			require.Contains(t, got.body, text)
		}
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/admin/pause",
			strings.NewReader("limit=gateway.key&key=a&span=1&unit=hour&reason=none"))
		require.NoError(t, err)
		request.Header.Set("Authorization", as("ben", "look"))
		request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		request.Header.Set("Origin", url)
		response, err := http.DefaultClient.Do(request)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		require.Equal(t, http.StatusForbidden, response.StatusCode)
	})

	t.Run("PausesAKeyInABrowser", func(t *testing.T) {
		t.Parallel()
		hello := func() answer { return get(t, url+"/v1/hello", map[string]string{"Authorization": "Bearer pro-key"}) }
		require.Equal(t, http.StatusOK, hello().status)
		tab, cancel := context.WithTimeout(browsertest.New(t), 5*time.Minute)
		defer cancel()
		_, err := chromedp.Call(tab, network.Enable, network.EnableParams{})
		require.NoError(t, err)
		_, err = chromedp.Call(tab, network.SetExtraHTTPHeaders, network.SetExtraHTTPHeadersParams{
			Headers: network.Headers{"Authorization": as("ana", "change")},
		})
		require.NoError(t, err)
		submit := func(form string, fields map[string]string) {
			for name, value := range fields {
				require.NoError(t, chromedp.Do(tab, chromedp.SetValue(form+" [name="+name+"]", value)))
			}
			require.NoError(t, chromedp.Do(tab, chromedp.Submit(form)))
		}
		require.NoError(t, chromedp.Do(tab, chromedp.Navigate(url+"/admin/limit?name=gateway.key")))
		submit(`form[action="find"]`, map[string]string{"typed": "0|grace"}) // as FirstOf writes a customer's
		require.NoError(t, chromedp.Do(tab, chromedp.WaitReady(`form[action="pause"]`)))
		submit(`form[action="pause"]`, map[string]string{"reason": "his key was published"})
		require.NoError(t, chromedp.Do(tab, chromedp.WaitReady(`form[action="resume"]`)))

		require.Eventually(t, func() bool { return hello().status == http.StatusTooManyRequests }, patience, time.Millisecond)
		history := get(t, url+"/admin/history", map[string]string{"Authorization": as("ben", "look")})
		require.Contains(t, history.body, "his key was published")
		require.Contains(t, history.body, "ana")
	})
}

// The playground is for everybody, and asks no server.
func TestPlayground(t *testing.T) {
	t.Parallel()
	url := serveGateway(t, new(upstream))
	tab, cancel := context.WithTimeout(browsertest.New(t), 5*time.Minute)
	defer cancel()
	require.NoError(t, chromedp.Do(tab, chromedp.Navigate(url)))
	require.NoError(t, chromedp.Do(tab, chromedp.Click(`a[href="/playground/"]`)))
	require.NoError(t, chromedp.Do(tab, chromedp.WaitReady(`[name="preset"]`)))
}

// What a gateway refuses is in the table that the admin page reads.
func TestRefusalsAreWrittenDown(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	g, err := newGateway(t.Context(), config{
		pool: pool, upstream: serveBehind(t, new(upstream)), customers: listenCustomers(), source: httplimit.Peer,
		hashKey: secret(), patience: patience, log: slog.New(slog.DiscardHandler),
	})
	require.NoError(t, err)
	require.NoError(t, g.whileUpToDate(t.Context(), func() error {
		for range 2 {
			request := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/v1/hello", http.NoBody)
			request.Header.Set("Authorization", "Bearer free-key")
			request.Header.Set(costHeader, "60")
			g.ServeHTTP(httptest.NewRecorder(), request)
		}
		return nil
	}))
	top, err := refusals.Top(t.Context(), pool, "", refusals.TopConfig{By: refusals.ByKey})
	require.NoError(t, err)
	require.Len(t, top, 1)
	require.Equal(t, perKey.Name(), top[0].Limit)
	require.NotEmpty(t, top[0].Key)
	require.Equal(t, 60.0, top[0].Cost)
}
