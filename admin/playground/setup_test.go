package playground_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/admin/playground"
	"github.com/pgratelimit/pgratelimit/internal/browsertest"
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
	tab context.Context //nolint:containedctx // chromedp's contexts are its tabs

	mutex    sync.Mutex
	problems []string // errors of the console, exceptions, and what the Content-Security-Policy has stopped
	requests []string
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
	p.tab = browser.Tab(t, chromedp.WithListener(p.listen))
	p.goTo(t, url)
	t.Cleanup(func() { require.Empty(t, p.seen(&p.problems)) })
	return p
}

// listen keeps what the browser tells.
func (p *page) listen(event any) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	switch e := event.(type) {
	case *network.EventRequestWillBeSent:
		p.requests = append(p.requests, e.Request.URL)
	case *runtime.EventExceptionThrown:
		p.problems = append(p.problems, e.ExceptionDetails.Text+" "+e.ExceptionDetails.Exception.Description)
	case *runtime.EventConsoleAPICalled:
		p.problems = append(p.problems, "the page wrote to the console: "+string(e.Type))
	case *log.EventEntryAdded:
		p.problems = append(p.problems, e.Entry.Text)
	}
}

// seen returns a copy of what listen has kept.
func (p *page) seen(list *[]string) []string {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return append([]string(nil), *list...)
}

// goTo loads an address anew, also where only its fragment differs.
func (p *page) goTo(t *testing.T, url string) {
	t.Helper()
	require.NoError(t, chromedp.Do(p.tab, chromedp.Navigate("about:blank"), chromedp.Navigate(url)))
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

// play runs the body of an async function in the page and returns what it returns.
func play[T any](t *testing.T, p *page, body string) T {
	t.Helper()
	ctx, cancel := context.WithTimeout(p.tab, 5*time.Minute)
	defer cancel()
	result, err := chromedp.Run(ctx, chromedp.Evaluate[T]("(async () => {"+body+"})()", chromedp.EvalAwaitPromise))
	require.NoError(t, err)
	return result
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

// prefer sets what the user prefers, as "prefers-color-scheme" "dark".
func (p *page) prefer(t *testing.T, features ...string) {
	t.Helper()
	var media []*emulation.MediaFeature
	for i := 0; i < len(features); i += 2 {
		media = append(media, &emulation.MediaFeature{Name: features[i], Value: features[i+1]})
	}
	_, err := chromedp.Call(p.tab, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: media})
	require.NoError(t, err)
}

// presetIDs returns the presets of the page.
func presetIDs(t *testing.T, p *page) []string {
	t.Helper()
	ids := play[[]string](t, p, `return [...document.querySelectorAll('[name=preset]')].map((radio) => radio.value);`)
	require.Len(t, ids, 9)
	return ids
}
