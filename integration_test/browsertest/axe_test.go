package browsertest

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
)

func TestAxe(t *testing.T) {
	t.Parallel()
	tab := New(t)
	open := func(body string) context.Context {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/html")
			w.Header().Set("Content-Security-Policy", "default-src 'none'")
			_, _ = fmt.Fprint(w, `<!doctype html><html lang="en"><title>A page</title><main><h1>A page</h1>`+body+`</main></html>`)
		}))
		t.Cleanup(server.Close)
		require.NoError(t, chromedp.Do(tab, chromedp.Navigate(server.URL)))
		return tab
	}
	require.Empty(t, Axe(t, open(`<label>Name <input></label>`)))

	found := Axe(t, open(`<input><p><font color="#aaa">hard to read</font></p>`))
	require.Len(t, found, 2)
	require.Equal(t, "color-contrast", found[0].ID)
	require.Equal(t, "serious", found[0].Impact)
	require.Equal(t, "label", found[1].ID)
	require.Equal(t, "critical", found[1].Impact)
	require.Len(t, found[1].Targets, 1)
	require.Contains(t, found[1].Targets[0], "<input>")
}
