package playground_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/admin/playground"
	"github.com/pgratelimit/pgratelimit/integration_test/browsertest"
)

var browser browsertest.Shared

func TestMain(m *testing.M) {
	code := m.Run()
	if err := browser.Close(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// page is the playground in a tab of a browser.
type page struct {
	tab   context.Context //nolint:containedctx // chromedp's contexts are its tabs
	watch *browsertest.Watch
}

// serve serves the playground below a prefix, as a page for administrators does, and returns its address.
func serve(t *testing.T) string {
	t.Helper()
	mux := http.NewServeMux()
	mux.Handle("/admin/playground/", playground.Handler())
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return server.URL + "/admin/playground/"
}

// open opens an address in a tab of the test's own. When the test ends there have been no problems.
func open(t *testing.T, url string) *page {
	t.Helper()
	p := &page{}
	p.watch = browsertest.NewWatch(t)
	p.tab = browser.Tab(t, chromedp.WithListener(p.watch.Listen))
	p.goTo(t, url)
	return p
}

// goTo loads an address anew, also where only its fragment differs. If time runs then, it goes back to the start and
// stands still. In the page, set(id, value) enters a value.
func (p *page) goTo(t *testing.T, url string) {
	t.Helper()
	require.NoError(t, chromedp.Do(p.tab, chromedp.Navigate("about:blank"), chromedp.Navigate(url)))
	play[bool](t, p, `
		window.set = (id, value, event = 'input') => {
			const element = document.getElementById(id);
			element.value = value;
			element.dispatchEvent(new Event(event));
		};
		const run = document.getElementById('run');
		if (run?.dataset.running === 'true') document.getElementById('restart').click();
		return true;`)
}

// follow goes to a fragment of the page that is open, as a link on it does.
func (p *page) follow(t *testing.T, fragment string) {
	t.Helper()
	play[bool](t, p, `
		const fragment = `+strconv.Quote(fragment)+`;
		if (location.hash === fragment) return true;
		const followed = new Promise((resolve) => addEventListener('hashchange', resolve, { once: true }));
		location.hash = fragment;
		await followed;
		return true;`)
}

// play runs the body of an async function in the page and returns its result.
func play[T any](t *testing.T, p *page, body string) T {
	t.Helper()
	return browsertest.Play[T](t, p.tab, body)
}

// text returns what an element shows, with single spaces, and "" where it is hidden.
func (p *page) text(t *testing.T, id string) string {
	t.Helper()
	return strings.Join(strings.Fields(play[string](t, p, `
		const element = document.getElementById('`+id+`');
		return element.checkVisibility() ? element.innerText : '';`)), " ")
}

// press presses keys.
func (p *page) press(t *testing.T, keys string) {
	t.Helper()
	require.NoError(t, chromedp.Do(p.tab, chromedp.KeyEvent(keys)))
}
