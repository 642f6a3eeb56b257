package browsertest

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
)

// recorder is a test that notes that it failed.
type recorder struct {
	testing.TB
	cleanups []func()
	failed   int
}

func (r *recorder) Cleanup(f func())      { r.cleanups = append(r.cleanups, f) }
func (r *recorder) Errorf(string, ...any) { r.failed++ }

func TestNewWatched(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		w.Header().Set("Content-Security-Policy", "default-src 'none'")
		_, _ = w.Write([]byte(`<!doctype html><link rel="icon" href="data:,"><p>A page</p>`))
	}))
	t.Cleanup(server.Close)
	watching := &recorder{TB: t}
	tab, watch := NewWatched(watching)
	require.NoError(t, chromedp.Do(tab, chromedp.Navigate(server.URL)))
	require.Equal(t, server.URL+"/", watch.Requests()[0])
	Prefer(t, tab, "prefers-color-scheme", "dark")
	require.True(t, Play[bool](t, tab, `return matchMedia('(prefers-color-scheme: dark)').matches;`))
	before := len(watch.seen(&watch.problems))
	Play[bool](t, tab, `console.warn('x'); setTimeout(() => { throw new Error('thrown'); }); await new Promise((r) => setTimeout(r)); return true;`)
	require.Len(t, watch.seen(&watch.problems)[before:], 2)
	for i := range watching.cleanups {
		watching.cleanups[len(watching.cleanups)-1-i]()
	}
	require.Equal(t, before+2, watching.failed)
}
