package client_test

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestClient plays each scene of testdata/scenes.js in a browser, on a page of its own.
func TestClient(t *testing.T) {
	t.Parallel()
	mux := http.NewServeMux()
	mux.Handle("/testdata/", http.FileServer(http.Dir(".")))
	site := newSite(t, mux)
	scenes := play[[]string](t, site.browser, `return Object.keys(await import('/testdata/scenes.js'));`)
	require.NotEmpty(t, scenes)
	for _, scene := range scenes {
		t.Run(scene, func(t *testing.T) {
			site.open(t, site.browser)
			require.Empty(t, play[string](t, site.browser, `
				const { `+scene+`: scene } = await import('/testdata/scenes.js');
				try { await scene(); } catch (e) { return e.stack; }
				return '';`))
		})
	}
}
