package main

import (
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/browsertest"
	"github.com/pgratelimit/pgratelimit/internal/testsize"
)

// On a phone the page has to be scrolled to no side, its buttons can be tapped, and nothing keeps people from using it.
func TestPageOnAPhone(t *testing.T) {
	t.Parallel()
	testsize.Long(t, "starts a browser")
	url := serveGateway(t, new(upstream))
	tab := browsertest.New(t)
	requireFits := func(state string) {
		for _, width := range []int64{390, 360} {
			for _, scheme := range []string{"light", "dark"} {
				browsertest.AsPhone(t, tab, width, scheme)
				require.Empty(t, browsertest.Misfits(t, tab, width), "%s, at %d", state, width)
				require.Empty(t, browsertest.Axe(t, tab), "%s, %s", state, scheme)
			}
		}
	}
	require.NoError(t, chromedp.Do(tab, chromedp.Navigate(url)))
	requireFits("at first")
	_, err := chromedp.Run(tab, chromedp.Evaluate[bool](`new Promise((resolve) => {
		const answer = document.getElementById('answer');
		const press = () => answer.textContent.startsWith('Refused') ? resolve(true) : document.querySelector('button[data-cost="25"]').click();
		new MutationObserver(press).observe(answer, { childList: true });
		press();
	})`, chromedp.EvalAwaitPromise))
	require.NoError(t, err)
	requireFits("refused")
}
