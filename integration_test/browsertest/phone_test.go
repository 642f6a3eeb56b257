package browsertest

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
)

func TestMisfits(t *testing.T) {
	t.Parallel()
	tab := New(t)
	misfits := func(body string) []string {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/html")
			_, _ = w.Write([]byte(`<!doctype html><meta name="viewport" content="width=device-width, initial-scale=1"><style>
				body { margin: 0 } button { width: 44px; height: 44px } .dark { display: none }
				@media (prefers-color-scheme: dark) { .dark { display: block } }</style>` + body))
		}))
		t.Cleanup(server.Close)
		require.NoError(t, chromedp.Do(tab, chromedp.Navigate(server.URL)))
		return Misfits(t, tab, 360)
	}
	AsPhone(t, tab, 360, "light")
	require.Empty(t, misfits(`<div style="width: 360px">That <a href="/">link</a> is small.</div><button>A</button><input type="hidden">`))
	require.Equal(t, []string{"the page is 361 pixels wide"}, misfits(`<div style="width: 361px">wide</div>`))
	require.Equal(t, []string{`44 by 43: <button style="height: 43px">A</button>`}, misfits(`<button style="height: 43px">A</button>`))
	require.Len(t, misfits(`<a href="/" style="display: inline-block">A</a><summary style="width: 10px">B</summary>`), 2)
	const inTheDark = `<button class="dark" style="width: 20px">A</button>`
	require.Empty(t, misfits(inTheDark))
	AsPhone(t, tab, 360, "dark")
	require.Len(t, misfits(inTheDark), 1)
}
