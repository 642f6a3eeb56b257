package playground_test

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/admin/playground"
	"github.com/pgratelimit/pgratelimit/integration_test/browsertest"
)

// exported returns the path of the page as one file.
func exported(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "index.html")
	file, err := os.Create(path)
	require.NoError(t, err)
	require.NoError(t, playground.WriteHTML(file))
	require.NoError(t, file.Close())
	return path
}

// TestTheFileWorksByItself opens the page as one file, from a disk and from a server that has nothing else.
func TestTheFileWorksByItself(t *testing.T) {
	t.Parallel()
	path := exported(t)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/docs/" {
			http.NotFound(w, r)
			return
		}
		text, err := os.ReadFile(path)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "text/html")
		_, _ = w.Write(text)
	}))
	t.Cleanup(server.Close)
	served := open(t, serve(t))
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

	for _, id := range presetIDs(t, p) { // the same page, however it came
		choose := `
			document.getElementById('preset-` + id + `').click();
			const scrub = document.getElementById('scrub');
			scrub.value = scrub.max / 3;
			scrub.dispatchEvent(new Event('input'));
			return true;`
		play[bool](t, p, choose)
		play[bool](t, served, choose)
		const all = `
			document.getElementById('said').textContent = ''; // which tells what was chosen last
			const values = [...document.querySelectorAll('input, select')].map((e) => [e.id, e.value, e.checked].join(' '));
			return [document.body.innerText, ...values];`
		require.Equal(t, play[[]string](t, served, all), play[[]string](t, p, all))
	}
}
