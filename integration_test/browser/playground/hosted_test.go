package playground_test

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/admin/playground"
	"github.com/pgratelimit/pgratelimit/integration_test/browsertest"
)

// TestTheFileWorksByItself opens the page as one file, from a disk and from a server that has nothing else.
func TestTheFileWorksByItself(t *testing.T) {
	t.Parallel()
	var text bytes.Buffer
	require.NoError(t, playground.WriteHTML(&text))
	path := filepath.Join(t.TempDir(), "index.html")
	require.NoError(t, os.WriteFile(path, text.Bytes(), 0o600))
	mux := http.NewServeMux()
	mux.HandleFunc("/docs/{$}", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_, _ = w.Write(text.Bytes())
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	p := open(t, "file://"+path)
	for _, url := range []string{"file://" + path, server.URL + "/docs/"} {
		before := len(p.watch.Requests())
		p.goTo(t, url)
		require.Contains(t, p.text(t, "lane-token"), "Admitted 1 Refused 0")
		p.goTo(t, url+"#preset=model&at=60")
		require.Equal(t, "60 s", p.text(t, "time"))
		p.press(t, ".")
		require.Equal(t, "60.11 s", p.text(t, "time"))
		p.press(t, "d")
		require.Empty(t, browsertest.Axe(t, p.tab))
		require.Contains(t, play[string](t, p, `return location.href;`), url+"#preset=model&at=60.1")
		for _, asked := range p.watch.Requests()[before:] {
			require.Contains(t, []string{url, "about:blank", "data:,"}, asked)
		}
	}
}
