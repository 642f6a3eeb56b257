package client_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/browser"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/browsertest"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/middleware/httplimit/client"
	"github.com/pgratelimit/pgratelimit/ratelimit"
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

// play runs the body of an async function in the tab and returns its result.
func play[T any](t *testing.T, tab context.Context, body string) T {
	t.Helper()
	return browsertest.Play[T](t, tab, body)
}

// TestPageInTheDocumentation presses the button of the page that the package's documentation shows, until no
// more is left.
func TestPageInTheDocumentation(t *testing.T) {
	t.Parallel()
	sendMessage := ratelimit.Define("sendMessage", ratelimit.TokenBucket{Rate: 3, Period: time.Hour})
	limiter, err := ratelimit.New(postgrestest.New(t), ratelimit.Config{})
	require.NoError(t, err)
	script := "let calendar = 0; Date.now = () => (calendar += 1e9);\n" + documentedScript(t) // its wall clock is wrong, and jumps
	state, err := httplimit.NewClientState(httplimit.ClientStateConfig{
		Limiter: limiter, Limits: []ratelimit.Limit{sendMessage},
		Key: func(r *http.Request) (string, error) {
			cookie, err := r.Cookie("user")
			if err != nil {
				return "", httplimit.ErrNoKey
			}
			return cookie.Value, nil
		},
		Timeout: time.Hour, // a busy machine is no reason to refuse
	})
	require.NoError(t, err)
	mux := http.NewServeMux()
	mux.Handle("/limits", state)
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
		http.SetCookie(w, &http.Cookie{Name: "user", Value: "alice", HttpOnly: true, SameSite: http.SameSiteStrictMode})
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
	source, err := os.ReadFile("../../../middleware/httplimit/client/client.go")
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

// TestHiddenPagesDoNotPoll minimizes the window of a page that polls a hundred times a second.
func TestHiddenPagesDoNotPoll(t *testing.T) {
	t.Parallel()
	mux := http.NewServeMux()
	mux.HandleFunc("/limits", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprint(w, `{"limits": [], "left_out": ["calls"]}`)
	})
	tab := newSite(t, mux).browser
	play[bool](t, tab, `
		const { createClient } = await import('/ratelimit.js');
		const pages = window.pages = { polls: 0, hidden: 0, shown: 0 };
		const change = (to) => new Promise((resolve) => document.addEventListener('visibilitychange', () => {
			if (document.hidden !== (to === 'hidden')) return;
			pages[to] = pages.polls;
			resolve();
		}));
		pages.hide = change('hidden');
		pages.show = change('shown'); // told before the client is
		const counted = (url, init) => { pages.polls++; return fetch(url, init); };
		pages.client = createClient({ url: '/limits', pollMs: 10, timeoutMs: 3600e3, fetch: counted });
		await new Promise((resolve) => pages.client.subscribe(() => pages.polls > 5 && resolve()));
		return true;`)

	setWindow(t, tab, browser.WindowStateMinimized)
	require.True(t, play[bool](t, tab, `
		await pages.hide;
		for (let i = 0; i < 50; i++) await fetch('/limits'); // as long as a score of polls
		return document.hidden;`))
	setWindow(t, tab, browser.WindowStateNormal)
	polls := play[[]float64](t, tab, `
		await pages.show;
		const { hidden, shown } = pages;
		await new Promise((resolve) => pages.client.subscribe(() => pages.polls > shown + 5 && resolve()));
		pages.client.close();
		return [hidden, shown];`)
	require.Equal(t, polls[0], polls[1])
}

func setWindow(t *testing.T, tab context.Context, state browser.WindowState) {
	t.Helper()
	window, err := chromedp.Call(tab, browser.GetWindowForTarget, browser.GetWindowForTargetParams{})
	require.NoError(t, err)
	_, err = chromedp.Call(tab, browser.SetWindowBounds, browser.SetWindowBoundsParams{
		WindowID: window.WindowID, Bounds: &browser.Bounds{WindowState: state},
	})
	require.NoError(t, err)
}
