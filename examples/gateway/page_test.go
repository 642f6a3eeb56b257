package main

import (
	"context"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/browsertest"
)

// TestPage presses the buttons and watches the number, in a real browser.
func TestPage(t *testing.T) {
	t.Parallel()
	url := serveGateway(t, new(upstream))
	ctx, cancel := context.WithTimeout(browsertest.New(t), 5*time.Minute)
	defer cancel()
	require.NoError(t, chromedp.Do(ctx, chromedp.Navigate(url+"/")))
	seen, err := chromedp.Run(ctx, chromedp.Evaluate[struct {
		Full    int    `json:"full"`
		Spent   string `json:"spent"`
		Left    int    `json:"left"`
		Rising  []int  `json:"rising"`
		Refused string `json:"refused"`
		Waits   []int  `json:"waits"`
	}](`(async () => {
		const [left, answer] = ['left', 'answer'].map((id) => document.getElementById(id));
		const tokens = () => Number(left.value); // NaN before the first poll
		const until = (look) => new Promise((resolve) => {
			const again = () => { const found = look(); found ? resolve(found) : requestAnimationFrame(again); };
			again();
		});
		const press = async (cost) => {
			answer.textContent = '';
			document.querySelector('button[data-cost="' + cost + '"]').click();
			return until(() => answer.textContent);
		};
		const full = await until(tokens);
		const spent = await press(25);
		const before = await until(() => tokens() < full && tokens());
		const rising = [];
		await until(() => {
			if (tokens() !== rising.at(-1)) rising.push(tokens());
			return rising.length === 4;
		});
		let refused = '', waits = [];
		while (waits.length < 3) { // a machine that is slow may be told too short a wait to watch
			let text = '';
			while (!text.startsWith('Refused')) text = await press(25);
			refused ||= text;
			waits = [];
			await until(() => {
				const wait = Number(answer.textContent.match(/can be had in (\d+) s/)?.[1]);
				if (wait && wait !== waits.at(-1)) waits.push(wait);
				return waits.length === 3 || answer.textContent.startsWith('Try again');
			});
		}
		return { full, spent, left: before, rising, refused, waits };
	})()`, chromedp.EvalAwaitPromise))
	require.NoError(t, err)
	require.Equal(t, 60, seen.Full)
	require.Equal(t, "Spent 25.", seen.Spent)
	require.Less(t, seen.Left, 60)
	require.IsIncreasing(t, seen.Rising, "one token arrives each second")
	require.Regexp(t, `^Refused: (try again|25 can be had) in \d+ s\.$`, seen.Refused)
	require.IsDecreasing(t, seen.Waits)
}

// TestPageIsStrict has the page allow what it needs and no more.
func TestPageIsStrict(t *testing.T) {
	t.Parallel()
	got := get(t, serveGateway(t, new(upstream))+"/", nil)
	require.Contains(t, got.header.Get("Content-Security-Policy"), "default-src 'none'; script-src 'self'")
	require.NotContains(t, got.body, "<script>")
	require.NotContains(t, got.body, "style=")
}
