package playground_test

import (
	_ "embed"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/browsertest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
)

//go:embed testdata/pictures.js
var pictures string

// picture is a file of docs/images, and the figures in it.
type picture struct {
	Text string `json:"text"`
	Told string `json:"told"`
}

// TestPicturesAreUpToDate draws the picture of each kind of limit in docs/images, with the code of the page, and
// compares it with the stored picture. With -update it writes them.
func TestPicturesAreUpToDate(t *testing.T) {
	t.Parallel()
	p := open(t, serve(t))
	style, err := os.ReadFile("../../../admin/playground/web/style.css")
	require.NoError(t, err)
	drawn := play[map[string]picture](t, p, "const style = "+strconv.Quote(string(style))+";\n"+pictures)
	require.Len(t, drawn, 6)
	recipes, err := os.ReadFile("../../../docs/recipes.md")
	require.NoError(t, err)
	for name, picture := range drawn {
		path := filepath.Join("..", "..", "..", "docs", "images", name)
		if testkit.Updating() {
			require.NoError(t, os.WriteFile(path, []byte(picture.Text), 0o644))
		}
		file, err := os.ReadFile(path)
		require.NoError(t, err, "go test ./integration_test/browser/playground -run Pictures -update")
		require.Equal(t, picture.Text, string(file), "%s: go test ./integration_test/browser/playground -run Pictures -update", name)
		require.Less(t, len(file), 20_000, name)
		require.Contains(t, string(recipes), "(images/"+name+")")
	}
}

// TestPicturesHaveRoomForOtherFonts promises that the texts of each SVG in docs/images stay in the picture, stay in the
// box that they begin in, and do not overlap. It sets wide fonts; a font that is not installed falls back to another.
func TestPicturesHaveRoomForOtherFonts(t *testing.T) {
	t.Parallel()
	pictures, err := filepath.Glob("../../../docs/images/*.svg")
	require.NoError(t, err)
	require.NotEmpty(t, pictures)
	p := open(t, serve(t))
	for _, picture := range pictures {
		path, err := filepath.Abs(picture)
		require.NoError(t, err)
		p.goTo(t, "file://"+path)
		for _, font := range []string{"DejaVu Sans", "Liberation Sans", "Noto Sans", "serif"} {
			require.Empty(t, play[[]string](t, p, `
				const root = document.documentElement, picture = root.getBoundingClientRect();
				const texts = [...document.querySelectorAll('text')].filter((text) => text.textContent.trim());
				for (const text of texts) text.style.fontFamily = `+strconv.Quote(strconv.Quote(font))+`;
				const boxes = texts.map((text) => ({ text: text.textContent, at: text.getBoundingClientRect() }));
				const rects = [...root.querySelectorAll(':scope > rect, :scope > g > rect')].map((rect) => rect.getBoundingClientRect());
				const found = [];
				boxes.forEach(({ text, at }, i) => {
					if (at.left < picture.left || at.right > picture.right) found.push(text + ' leaves the picture');
					for (const rect of rects) {
						const begins = at.left >= rect.left && at.left < rect.right && at.top >= rect.top && at.bottom <= rect.bottom;
						if (begins && at.right > rect.right) found.push(text + ' leaves its box');
					}
					for (const { text: other, at: beside } of boxes.slice(i + 1)) {
						const across = Math.min(at.right, beside.right) - Math.max(at.left, beside.left);
						const down = Math.min(at.bottom, beside.bottom) - Math.max(at.top, beside.top);
						if (across > 1 && down > 5) found.push(text + ' overlaps ' + other);
					}
				});
				return found;`), "%s in %s", filepath.Base(picture), font)
		}
	}
}

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
