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

// TestFindsProblems promises that the helpers find the problems of a page that has some, and none on a good page.
func TestFindsProblems(t *testing.T) {
	t.Parallel()
	watching := &recorder{TB: t}
	tab, watch := NewWatched(watching)
	t.Cleanup(func() {
		for i := range watching.cleanups {
			watching.cleanups[len(watching.cleanups)-1-i]()
		}
		require.Equal(t, 1, watching.failed, "it tells of the thrown error alone")
	})
	open := func(body string) string {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/html")
			_, _ = w.Write([]byte(`<!doctype html><html lang="en"><meta name="viewport" content="width=device-width, initial-scale=1">
				<link rel="icon" href="data:,"><title>A page</title><style>body { margin: 0 } button { width: 44px; height: 44px }</style>
				<main><h1>A page</h1>` + body + `</main></html>`))
		}))
		t.Cleanup(server.Close)
		require.NoError(t, chromedp.Do(tab, chromedp.Navigate(server.URL)))
		return server.URL + "/"
	}
	require.NoError(t, chromedp.Do(tab, chromedp.EmulateViewport(360, 800)))
	url := open(`<label>Name <input style="width: 50px; height: 50px"></label><p>That <a href="/">link</a> is small.</p><button>A</button>`)
	require.Contains(t, watch.Requests(), url)
	require.Empty(t, Axe(t, tab))
	require.Empty(t, Misfits(t, tab, 360))

	open(`<input style="width: 10px"><p style="width: 361px"><font color="#aaa">hard to read</font></p>`)
	found := Axe(t, tab)
	require.Len(t, found, 2)
	require.Equal(t, []string{"color-contrast", "label"}, []string{found[0].ID, found[1].ID})
	misfits := Misfits(t, tab, 360)
	require.Len(t, misfits, 2)
	require.Equal(t, "the page is 361 pixels wide", misfits[0])
	Prefer(t, tab, "prefers-color-scheme", "dark")
	require.True(t, Play[bool](t, tab, `return matchMedia('(prefers-color-scheme: dark)').matches;`))
	require.Empty(t, watch.seen(&watch.problems))
	Play[bool](t, tab, `setTimeout(() => { throw new Error('thrown'); }); await new Promise((r) => setTimeout(r)); return true;`)
	require.Len(t, watch.seen(&watch.problems), 1)
}
