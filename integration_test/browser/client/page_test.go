package client_test

import (
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// TestPageInTheDocumentation presses the button of the page that the package's documentation shows, until no
// more is left.
func TestPageInTheDocumentation(t *testing.T) {
	t.Parallel()
	sendMessage := ratelimit.Define("sendMessage", ratelimit.TokenBucket{Rate: 3, Period: time.Hour})
	limiter, err := ratelimit.New(postgrestest.New(t), ratelimit.Config{})
	require.NoError(t, err)
	script := documentedScript(t)
	mux := http.NewServeMux()
	mux.Handle("/limits", newClientState(t, limiter, alice, sendMessage))
	mux.HandleFunc("POST /messages", func(w http.ResponseWriter, r *http.Request) {
		if _, err := limiter.Take(r.Context(), sendMessage.For("alice")); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	})
	mux.HandleFunc("GET /page.js", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/javascript")
		_, _ = fmt.Fprint(w, script)
	})
	mux.HandleFunc("GET /page", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		w.Header().Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; connect-src 'self'")
		_, _ = fmt.Fprint(w, `<!doctype html><output id="left"></output><button id="send">Send</button>`+
			`<script type="module" src="/page.js"></script>`)
	})
	site := newSite(t, mux)
	require.NoError(t, chromedp.Do(site.browser, chromedp.Navigate(site.url+"/page")))
	seen := play[[]any](t, site.browser, `
		const left = document.getElementById('left'), send = document.getElementById('send');
		const seen = [];
		for (const text of ['3 left', '2 left', '1 left', 'again in']) {
			await new Promise((resolve) => {
				const look = () => (left.value.startsWith(text) ? resolve() : requestAnimationFrame(look));
				look();
			});
			seen.push(send.disabled);
			send.click();
		}
		return [...seen, left.value];`)
	require.Equal(t, []any{false, false, false, true}, seen[:4])
	require.Regexp(t, `^again in 1[12]\d\d s$`, seen[4])
}

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

// documentedScript returns page.js as the package's documentation has it.
func documentedScript(t *testing.T) string {
	t.Helper()
	source, err := os.ReadFile("../../../httplimit/client/client.go")
	require.NoError(t, err)
	var script strings.Builder
	for line := range strings.Lines(string(source)) {
		code, isCode := strings.CutPrefix(line, "//\t")
		if isCode && (script.Len() > 0 || strings.HasPrefix(code, "import ")) {
			script.WriteString(code)
		}
	}
	require.Contains(t, script.String(), "createClient(")
	return script.String()
}
