package client_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit/client"
	"github.com/pgratelimit/pgratelimit/integration_test/browsertest"
)

// site is a server on loopback that a browser looks at.
type site struct {
	url     string
	browser context.Context //nolint:containedctx // chromedp's contexts are its tabs
}

// newSite serves mux, with an empty page and the module, and opens the page.
func newSite(t *testing.T, mux *http.ServeMux) *site {
	t.Helper()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_, _ = w.Write([]byte("<!doctype html><title>Limits</title>"))
	})
	mux.Handle("/ratelimit.js", client.Handler())
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	s := &site{url: server.URL, browser: browsertest.New(t)}
	s.open(t, s.browser)
	return s
}

// open navigates the tab to the page.
func (s *site) open(t *testing.T, tab context.Context) {
	t.Helper()
	require.NoError(t, chromedp.Do(tab, chromedp.Navigate(s.url+"/")))
}

// newTab returns a tab with cookies of its own.
func (s *site) newTab(t *testing.T) context.Context {
	t.Helper()
	tab, cancel := chromedp.NewContext(s.browser, chromedp.WithNewBrowserContext())
	t.Cleanup(cancel)
	s.open(t, tab)
	return tab
}

// play runs the body of an async function in the tab and returns its result.
func play[T any](t *testing.T, tab context.Context, body string) T {
	t.Helper()
	return browsertest.Play[T](t, tab, body)
}
