package admin_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/browsertest"
	"github.com/pgratelimit/pgratelimit/internal/admintest"
)

// TestPictures writes the pictures of docs/admin.md, with RATELIMIT_PICTURES=1.
func TestPictures(t *testing.T) {
	t.Parallel()
	if os.Getenv("RATELIMIT_PICTURES") == "" {
		t.Skip("RATELIMIT_PICTURES is not set; with it the pictures of the documentation are made anew")
	}
	f := setup(t)
	id := f.Furnish(t)
	f.Exec(t, `DELETE FROM ratelimit.buckets WHERE key !~ '^[a-z0-9.]*$'`)
	f.Exec(t, `UPDATE ratelimit.rules SET from_us = from_us - 3600000000 WHERE of = 'override'`)
	f.Load(t)
	for i, key := range []string{"acme", "globex", "initech", "umbrella", "10.0.0.12", "10.0.3.4"} {
		f.Take(t, messages.For(key).Cost(float64(12*i+20)))
	}
	b := f.browse(t)
	for name, picture := range map[string]struct {
		page          string
		width, height int64
		scheme        string
	}{
		"admin-limit": {admintest.Pages(id)["limit"], 1100, 780, "light"},
		"admin-key":   {admintest.Pages(id)["key"], 1100, 800, "dark"},
		"admin-phone": {admintest.Pages(id)["key"], 390, 844, "light"},
	} {
		f.Exec(t, `UPDATE ratelimit.buckets SET value = 90, ts = (extract(epoch FROM now() - interval '40 seconds') * 1000000)::bigint
			WHERE name = 'messages' AND key = 'ada'`)
		b.width(t, picture.width, picture.height)
		browsertest.Prefer(t, b.ctx, "prefers-color-scheme", picture.scheme)
		b.open(t, picture.page)
		play[bool](t, b, `
			const live = document.querySelector('.live');
			while (live?.hidden) await new Promise(requestAnimationFrame);
			return true;`)
		png, err := chromedp.Run(b.ctx, chromedp.CaptureScreenshot())
		require.NoError(t, err)
		require.Less(t, len(png), 200_000, name)
		require.NoError(t, os.WriteFile(filepath.Join("..", "..", "..", "docs", "images", name+".png"), png, 0o600))
	}
}
