package playground_test

import (
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestPicturesHaveRoomForOtherFonts promises that the texts of each SVG in docs/images stay in the picture, stay in the box that
// they begin in, and do not overlap. It sets wide fonts; a font that is not installed falls back to another.
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
