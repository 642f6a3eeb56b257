package playground_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/browsertest"
)

// TestPictures writes the pictures of docs/admin.md, with RATELIMIT_PICTURES=1.
func TestPictures(t *testing.T) {
	t.Parallel()
	if os.Getenv("RATELIMIT_PICTURES") == "" {
		t.Skip("RATELIMIT_PICTURES is not set; with it the pictures of the documentation are made anew")
	}
	p := open(t, serve(t))
	for _, picture := range []struct {
		name, fragment string
		width, height  int64
		scheme         string
	}{
		{"playground", "#preset=idle&at=7.4", 1200, 1060, "light"},
	} {
		require.NoError(t, chromedp.Do(p.tab, chromedp.EmulateViewport(picture.width, picture.height)))
		browsertest.Prefer(t, p.tab, "prefers-color-scheme", picture.scheme)
		p.follow(t, picture.fragment)
		play[bool](t, p, `
			await new Promise(requestAnimationFrame);
			await Promise.all(document.getAnimations().map((transition) => transition.finished));
			return true;`)
		png, err := chromedp.Run(p.tab, chromedp.CaptureScreenshot())
		require.NoError(t, err)
		require.Less(t, len(png), 250_000, picture.name)
		require.NoError(t, os.WriteFile(filepath.Join("..", "..", "..", "docs", "images", picture.name+".png"), png, 0o600))
	}
}
