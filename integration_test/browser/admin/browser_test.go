// Package admin_test drives the page of package admin in a browser.
package admin_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/admin"
	"github.com/pgratelimit/pgratelimit/integration_test/browsertest"
	"github.com/pgratelimit/pgratelimit/internal/test/admintest"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

var (
	messages, tokens, trials, logins = admintest.Limits()
	limits                           = []ratelimit.Limit{messages, tokens, trials, logins}
	hostile                          = admintest.Hostile()
)

// fixture is a page on a database of its own.
type fixture struct {
	admintest.Site
	server *httptest.Server
}

// setup serves the page at /admin/ to a user who may change things.
func setup(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{Site: admintest.NewSite(t, postgrestest.New(t), ratelimit.Config{})}
	handler, err := admin.New(f.Limiter, f.Set, admin.Config{
		Pool: f.Pool, Limits: limits,
		Authorize: func(*http.Request) (admin.Identity, error) {
			return admin.Identity{Name: "Ana <ana@example.com>", MayChange: true}, nil
		},
	})
	require.NoError(t, err)
	mux := http.NewServeMux()
	mux.Handle("/admin/", handler)
	f.server = httptest.NewServer(mux)
	t.Cleanup(f.server.Close)
	return f
}

var upstream = rules.Rule{Limit: "upstream", Policy: ratelimit.TokenBucket{Rate: 50, Period: time.Minute}}

// tab is a tab of a browser that looks at the page.
type tab struct {
	ctx context.Context //nolint:containedctx // chromedp's contexts are its tabs
	url string
}

// browse opens a tab. When the test ends the browser has told of no problem.
func (f *fixture) browse(t *testing.T) *tab {
	t.Helper()
	ctx, _ := browsertest.NewWatched(t)
	return &tab{url: f.server.URL, ctx: ctx}
}

func (b *tab) open(t *testing.T, address string) {
	t.Helper()
	require.NoError(t, chromedp.Do(b.ctx, chromedp.Navigate(b.url+address)))
}

func (b *tab) width(t *testing.T, width, height int64) {
	t.Helper()
	require.NoError(t, chromedp.Do(b.ctx, chromedp.EmulateViewport(width, height)))
}

// play runs the body of an async function in the page and returns its result.
func play[T any](t *testing.T, b *tab, body string) T {
	t.Helper()
	return browsertest.Play[T](t, b.ctx, body)
}

// unfold opens folded parts, so that their forms are checked, too.
const unfold = `document.querySelectorAll('details').forEach((d) => { d.open = true; });`

// TestPagesInABrowser checks every page. It violates no Content-Security-Policy, has no serious fault for users of a
// screen reader or a keyboard, and fits the width of a phone.
func TestPagesInABrowser(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "starts a browser")
	f := setup(t)
	pages := admintest.Pages(f.Furnish(t))
	f.Put(t, append(admintest.Kinds(), upstream)...)
	f.Exec(t, `INSERT INTO ratelimit.upstreams VALUES ('upstream', 'ada', 3, 0, 0, 0, 0, 0, 0.4, true, $1)`, time.Now().Add(time.Hour).UnixMicro())
	for _, name := range []string{"exports", "quota", "jobs", "upstream"} {
		pages[name] = admintest.Address("key", "limit", name, "key", "ada")
	}
	_, err := f.Limiter.Acquire(t.Context(), admintest.RequestOf(t, "jobs"))
	require.NoError(t, err)
	b := f.browse(t)
	for name, page := range pages {
		b.open(t, page)
		play[bool](t, b, unfold+`return true;`)
		for _, scheme := range []string{"light", "dark"} {
			for _, width := range []int64{390, 1280} {
				b.width(t, width, 900)
				browsertest.Prefer(t, b.ctx, "prefers-color-scheme", scheme)
				require.Empty(t, browsertest.Axe(t, b.ctx), "%s, %s at %d", name, scheme, width)
			}
		}
		for _, width := range []int64{360, 390, 768} {
			b.width(t, width, 800)
			require.LessOrEqual(t, play[float64](t, b, `return document.documentElement.scrollWidth;`), float64(width), "%s at %d", name, width)
		}
		requireWholeRows(t, b, name)
	}
}

// requireWholeRows fails the test unless a click between the texts of a row follows the row's link.
func requireWholeRows(t *testing.T, b *tab, name string) {
	t.Helper()
	b.width(t, 1200, 900)
	require.Empty(t, play[[]string](t, b, `
		return [...document.querySelectorAll('.linked tbody tr:has(a)')].filter((row) => {
			row.scrollIntoView({ block: 'center' });
			const at = row.getBoundingClientRect();
			const link = document.elementFromPoint(at.right - 3, at.bottom - 3)?.closest('a');
			return row.querySelector('a') !== link;
		}).map((row) => row.textContent);`), name)
}

// TestHostileKeysInABrowser opens pages with keys that would run, if they could.
func TestHostileKeysInABrowser(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "starts a browser")
	f := setup(t)
	f.Furnish(t)
	b := f.browse(t)
	b.open(t, admintest.Address("limit", "name", "messages"))
	seen := play[[]string](t, b, `return [...document.querySelectorAll('tbody th .key')].map((e) => e.textContent);`)
	require.Contains(t, seen, hostile[0])
	require.Contains(t, seen, "adaU+202Egnp.exe")
	require.Equal(t, 1.0, play[float64](t, b, `return document.scripts.length;`))
	for _, key := range hostile {
		b.open(t, admintest.Address("key", "limit", "messages", "key", key))
		require.Equal(t, "A bucket of messages · Rate limits", play[string](t, b, `return document.title;`))
		require.Equal(t, 0.0, play[float64](t, b, `return document.images.length;`))
		require.Equal(t, key, play[string](t, b, unfold+`return document.querySelector('form[action=reset] [name=key]').value;`))
	}
}

// TestTheLevelInTheBrowserEqualsGo compares what the script shows, as tokens arrive, with the projection of the same
// bucket in Go.
func TestTheLevelInTheBrowserEqualsGo(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "starts a browser")
	f := setup(t)
	f.Put(t, append(admintest.Kinds(), upstream)...)
	_, err := f.Limiter.Acquire(t.Context(), admintest.RequestOf(t, "jobs").Cost(2))
	require.NoError(t, err)
	b := f.browse(t)
	requests := map[string]ratelimit.Request{"messages": messages.For("ada")}
	for _, name := range []string{"exports", "quota", "jobs", "upstream"} {
		requests[name] = admintest.RequestOf(t, name)
	}
	for name, request := range requests {
		if name != "jobs" {
			f.Take(t, request.Cost(12.5))
		}
		b.open(t, admintest.Address("key", "limit", name, "key", "ada"))
		seen := play[[]string](t, b, `
			const section = document.querySelector('[data-live]');
			while (!section.dataset.at || section.querySelector('.live').hidden) await new Promise(requestAnimationFrame);
			return [section.dataset.at, section.dataset.tokens, section.querySelector('.past').getAttribute('d').slice(0, 1)];`)
		us, err := strconv.ParseInt(seen[0], 10, 64)
		require.NoError(t, err)
		got, err := strconv.ParseFloat(seen[1], 64)
		require.NoError(t, err)
		require.Equal(t, "M", seen[2])
		require.Equal(t, f.Value(t, request).At(time.UnixMicro(us)), got, name)
	}
}

// TestButtons changes things as people do, without a script of the page.
func TestButtons(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.Take(t, logins.For("ada").Cost(10))
	b := f.browse(t)
	_, err := chromedp.Call(b.ctx, emulation.SetScriptExecutionDisabled, emulation.SetScriptExecutionDisabledParams{Value: true})
	require.NoError(t, err)
	b.open(t, "/admin/")
	require.NoError(t, chromedp.Do(b.ctx,
		chromedp.SendKeys(`input[name=typed]`, "ada\r"), chromedp.WaitVisible(`h1 .key`),
		chromedp.Click(`tbody th a`), chromedp.WaitVisible(`.curve`),
		chromedp.Click(`details:has(form[action=reset]) summary`), chromedp.Click(`form[action=reset] button`),
		chromedp.WaitVisible(`[role=status]`)))
	require.Equal(t, 10.0, f.Value(t, logins.For("ada")).Tokens)
}

// tabTo presses the tab key until an element has the focus, which must be seen.
func (b *tab) tabTo(t *testing.T, selector string) {
	t.Helper()
	for range 200 {
		require.NoError(t, chromedp.Do(b.ctx, chromedp.KeyEvent(kb.Tab)))
		if play[bool](t, b, `return document.activeElement.matches('`+selector+`');`) {
			require.NotEqual(t, "none", play[string](t, b, `return getComputedStyle(document.activeElement).outlineStyle;`), selector)
			return
		}
	}
	require.Fail(t, "the tab key does not reach "+selector)
}

// TestByKeyboardAlone finds a key, opens its bucket, reads a chart, and fills the bucket, without a pointer.
func TestByKeyboardAlone(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "starts a browser, and presses many keys")
	f := setup(t)
	f.Take(t, logins.For("ada").Cost(10))
	f.Exec(t, `INSERT INTO ratelimit.refusals SELECT date_trunc('minute', now()), 'failed-logins', 'x', 'ada', false, 7, 7, (extract(epoch FROM now()) * 1000000)::bigint`)
	b := f.browse(t)
	b.open(t, "/admin/")
	press := func(key, then string) {
		t.Helper()
		require.NoError(t, chromedp.Do(b.ctx, chromedp.KeyEvent(key), chromedp.WaitVisible(then)))
	}
	b.tabTo(t, `input[name=typed]`)
	press("ada\r", `h1 .key`)
	b.tabTo(t, `tbody th a`)
	press(kb.Enter, `.curve`)
	b.tabTo(t, `.bars svg`)
	for key := kb.End; ; key = kb.ArrowLeft { // a minute or more may have passed
		require.NoError(t, chromedp.Do(b.ctx, chromedp.KeyEvent(key)))
		says := play[string](t, b, `return document.querySelector('.bars output').textContent;`)
		if strings.HasSuffix(says, ": 0 allowed, 7 refused") {
			break
		}
		require.Contains(t, says, ": 0 allowed, 0 refused")
	}
	b.tabTo(t, `details:has(form[action=reset]) summary`)
	press(kb.Enter, `form[action=reset] button`)
	b.tabTo(t, `form[action=reset] button`)
	press(kb.Enter, `[role=status]`)
	require.Equal(t, 10.0, f.Value(t, logins.For("ada")).Tokens)
}

// TestLiveLevelFollowsOthers has another program take from the bucket that the page shows, and then change its policy.
func TestLiveLevelFollowsOthers(t *testing.T) {
	t.Parallel()
	f := setup(t)
	b := f.browse(t)
	b.open(t, admintest.Address("key", "limit", "failed-logins", "key", "ada"))
	shows := func(tokens, capacity string) {
		play[bool](t, b, fmt.Sprintf(`
			const figure = (name) => document.querySelector('[data-figure=' + name + ']').textContent;
			while (!figure('tokens').startsWith('%s') || figure('capacity') !== '%s') await new Promise(requestAnimationFrame);
			return true;`, tokens, capacity))
	}
	shows("10", "10")
	f.Take(t, logins.For("ada").Cost(7))
	shows("3", "10")
	f.Put(t, rules.Rule{Limit: "failed-logins", Policy: ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: 2}})
	shows("2", "2")
}

// TestButtonIsPressedTwice before the answer came: the form is sent once. It may be sent again from a page that is gone
// back to.
func TestButtonIsPressedTwice(t *testing.T) {
	t.Parallel()
	f := setup(t)
	b := f.browse(t)
	b.open(t, admintest.Address("key", "limit", "failed-logins", "key", "ada"))
	stopped := play[[]bool](t, b, unfold+`
		const stopped = [], form = document.querySelector('form[action=reset]'), button = form.querySelector('button');
		form.addEventListener('submit', (event) => {
			stopped.push(event.defaultPrevented);
			event.preventDefault();
		});
		button.click();
		button.click();
		dispatchEvent(new Event('pageshow'));
		button.click();
		return stopped;`)
	require.Equal(t, []bool{false, true, false}, stopped)
}

// TestListsRefresh has keys refused while their page is open. The list shows them, and leads to the form of an
// override. A chart shows the numbers of the bar under the pointer.
func TestListsRefresh(t *testing.T) {
	t.Parallel()
	f := setup(t)
	refuse := func(key string, times int) {
		f.Exec(t, `INSERT INTO ratelimit.refusals SELECT date_trunc('minute', now()), 'messages', 'x', $1, false, $2::int, $2::int,
			(extract(epoch FROM now()) * 1000000)::bigint`, key, times)
	}
	refuse("ada", 7)
	b := f.browse(t)
	b.open(t, admintest.Address("limit", "name", "messages"))
	require.Contains(t, play[string](t, b, `
		const bar = [...document.querySelectorAll('.bars .hit')].find((hit) => hit.textContent.includes(' 7 refused'));
		bar.dispatchEvent(new PointerEvent('pointerover', { bubbles: true }));
		return document.querySelector('.bars output').textContent;`), ": 0 allowed, 7 refused")
	b.open(t, "/admin/now")
	refuse("bob", 9)
	play[bool](t, b, `
		const keys = () => document.querySelector('[data-refresh=keys]').textContent;
		while (!keys().includes('bob')) await new Promise(requestAnimationFrame);
		return true;`)
	require.NoError(t, chromedp.Do(b.ctx, chromedp.Click(`a[href*="key=bob"][href$="#override"]`),
		chromedp.WaitVisible(`form[action="preview-override"] button`)))
}
