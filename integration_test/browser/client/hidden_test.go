package client_test

import (
	"context"
	"testing"

	"github.com/chromedp/cdproto/browser"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
)

// TestPagesThatNobodySeesDoNotPoll minimizes the window of a page that polls a hundred times a second.
func TestPagesThatNobodySeesDoNotPoll(t *testing.T) {
	t.Parallel()
	tab := newSignedInSite(t).browser
	play[bool](t, tab, prelude+`
		await signIn('s-alice');
		const pages = window.pages = { polls: 0, hidden: 0, shown: 0 };
		const change = (to) => new Promise((resolve) => document.addEventListener('visibilitychange', () => {
			if (document.hidden !== (to === 'hidden')) return;
			pages[to] = pages.polls;
			resolve();
		}));
		pages.hide = change('hidden');
		pages.show = change('shown'); // told before the client is
		const counted = (url, init) => { pages.polls++; return fetch(url, init); };
		const client = pages.client = createClient({ url: '/limits', pollMs: 10, timeoutMs: 3600e3, fetch: counted });
		await until(client, () => pages.polls > 5);
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
