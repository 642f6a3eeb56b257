package browsertest

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
)

// phoneTimeout is how long a busy machine may take to draw a page.
const phoneTimeout = 2 * time.Minute

// AsPhone has the tab be a phone with a touch screen, of so many CSS pixels' width, that prefers a color scheme:
// "light" or "dark".
func AsPhone(t testing.TB, tab context.Context, width int64, scheme string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(tab, phoneTimeout)
	defer cancel()
	if err := chromedp.Do(ctx, chromedp.EmulateViewport(width, 800, chromedp.EmulateMobile,
		chromedp.EmulateTouch)); err != nil {
		t.Fatalf("be a phone of %d pixels: %v", width, err)
	}
	features := []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}
	if _, err := chromedp.Call(ctx, emulation.SetEmulatedMedia,
		emulation.SetEmulatedMediaParams{Features: features}); err != nil {
		t.Fatalf("prefer %s: %v", scheme, err)
	}
}

// Misfits returns the parts of the page that do not fit a phone of that width: a page that scrolls to the side or must
// be zoomed out, and targets to tap under 44 pixels. A link within a sentence may be smaller.
func Misfits(t testing.TB, tab context.Context, width int64) []string {
	t.Helper()
	ctx, cancel := context.WithTimeout(tab, phoneTimeout)
	defer cancel()
	misfits, err := chromedp.Run(ctx, chromedp.Evaluate[[]string](fmt.Sprintf(`(() => {
		const misfits = [], wide = Math.max(document.scrollingElement.scrollWidth, innerWidth);
		if (wide > %d) misfits.push('the page is ' + wide + ' pixels wide');
		for (const e of document.querySelectorAll('a[href], button, input:not([type=hidden]), select, textarea, summary')) {
			const { width, height } = e.getBoundingClientRect();
			if (width === 0 || getComputedStyle(e).display === 'inline' && e.localName === 'a') continue; // hidden, or in a sentence
			if (width < 44 || height < 44) misfits.push(Math.round(width) + ' by ' + Math.round(height) + ': ' + e.outerHTML);
		}
		return misfits;
	})()`, width)))
	if err != nil {
		t.Fatalf("measure the page: %v", err)
	}
	return misfits
}
