package admin_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/browsertest"
	"github.com/pgratelimit/pgratelimit/internal/test/admintest"
	"github.com/pgratelimit/pgratelimit/internal/test/testkit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// asPhone is a phone of 360 pixels' width that looks at the page.
func (f *fixture) asPhone(t *testing.T) *tab {
	t.Helper()
	b := &tab{url: f.server.URL, ctx: browsertest.New(t)} // a phone has one tab: in another one touch emulation does not answer
	browsertest.AsPhone(t, b.ctx, 360, "light")
	return b
}

// TestPagesOnAPhone looks for elements that are too wide, or too small to tap.
func TestPagesOnAPhone(t *testing.T) {
	t.Parallel()
	testkit.Long(t, "starts a browser")
	f := setup(t)
	id := f.Furnish(t)
	b := f.asPhone(t)
	for name, page := range admintest.Pages(id) {
		b.open(t, page)
		play[bool](t, b, unfold+`return true;`)
		require.Empty(t, browsertest.Misfits(t, b.ctx, 360), name)
	}
}

// send fills in the form that sends to an action, presses its button, and waits for the page with the result.
func (b *tab) send(t *testing.T, page, action string, fields map[string]string) {
	t.Helper()
	b.open(t, page)
	b.press(t, action, fields, `[role=status]`)
}

// press fills in the form of the open page that sends to an action, presses its button, and waits for an element.
func (b *tab) press(t *testing.T, action string, fields map[string]string, result string) {
	t.Helper()
	play[bool](t, b, unfold+`return true;`)
	form := fmt.Sprintf(`form[action="%s"]`, action)
	for name, value := range fields {
		field := form + ` [name="` + name + `"]`
		if name == "says" {
			require.NoError(t, chromedp.Do(b.ctx, chromedp.Click(field+`[value="`+value+`"]`)))
			continue
		}
		require.NoError(t, chromedp.Do(b.ctx, chromedp.SetValue(field, value)))
	}
	require.NoError(t, chromedp.Do(b.ctx, chromedp.Click(form+` button`), chromedp.WaitVisible(result)))
}

// TestEachChangeByItsButton fills in every form that changes something, on a phone, and presses its button. What a form
// changes is tested in package admin.
func TestEachChangeByItsButton(t *testing.T) {
	t.Parallel()
	f := setup(t)
	b := f.asPhone(t)
	f.Put(t, rules.Rule{Limit: "messages", Plan: "pro", Policy: ratelimit.TokenBucket{Rate: 600, Period: time.Minute}})
	f.Take(t, messages.For("ada").Cost(90))
	r, err := f.Limiter.Reserve(t.Context(), tokens.For("acme").Cost(50_000))
	require.NoError(t, err)
	bucket, limit := admintest.Address("key", "limit", "messages", "key", "ada"), admintest.Address("limit", "name", "messages")
	for _, c := range []struct {
		page, action string
		fields       map[string]string
	}{
		{bucket, "credit", map[string]string{"tokens": "4", "plan": "pro"}},
		{bucket, "reset", map[string]string{"plan": "pro"}},
		{bucket, "pause", map[string]string{"for": "2d", "reason": "a leak"}},
		{bucket, "resume", map[string]string{"reason": "it is over"}},
		{bucket, "override", map[string]string{"says": "multiplier", "multiplier": "3"}},
		{bucket, "override", map[string]string{"says": "on_plan", "on_plan": "pro"}},
		{bucket, "override", map[string]string{"says": "policy", "rate": "1,500", "period": "1h"}},
		{bucket, "remove-override", map[string]string{"reason": "it is over"}},
		{admintest.Address("reservation", "id", r.ID), "cancel", nil},
		{limit, "pause", map[string]string{"reason": "an attack"}},
		{limit, "resume", map[string]string{"reason": "it is over"}},
	} {
		if c.action != "override" {
			b.send(t, c.page, c.action, c.fields)
			continue
		}
		b.open(t, c.page)
		b.press(t, "preview-override", c.fields, `form[action="override"]`)
		b.press(t, "override", map[string]string{"reason": "a launch"}, `[role=status]`)
	}
	b.open(t, admintest.Address("rule", "limit", "messages", "plan", ""))
	require.NoError(t, chromedp.Do(b.ctx,
		chromedp.SetValue(`form[action="preview"] [name="rate"]`, "45.5"), chromedp.Click(`form[action="preview"] button`),
		chromedp.WaitVisible(`form[action="put-rule"]`), chromedp.SetValue(`form[action="put-rule"] [name="reason"]`, "less"),
		chromedp.Click(`form[action="put-rule"] button`), chromedp.WaitVisible(`[role=status]`)))
	b.send(t, admintest.Address("rule", "limit", "messages", "plan", ""), "delete-rule", map[string]string{"reason": "it is over"})

	var made string
	require.NoError(t, f.Pool.QueryRow(t.Context(), `SELECT string_agg(of || ' ' || coalesce(says::text, 'ends'), '; ' ORDER BY version)
		FROM ratelimit.rules WHERE version > 1`).Scan(&made))
	for _, text := range []string{`"multiplier": 3`, `"on_plan": "pro"`, `1500`, `45.5`} {
		require.Contains(t, made, text)
	}
	require.Equal(t, 120_000.0, f.Value(t, tokens.For("acme")).Tokens)
}

// TestPictures writes the pictures of docs/admin.md, with RATELIMIT_PICTURES=1.
func TestPictures(t *testing.T) {
	t.Parallel()
	if os.Getenv("RATELIMIT_PICTURES") == "" {
		t.Skip("RATELIMIT_PICTURES is not set; with it the pictures of the documentation are made anew")
	}
	f := setup(t)
	id := f.Furnish(t)
	f.Exec(t, `DELETE FROM ratelimit.buckets WHERE key !~ '^[a-z0-9.]*$'`)
	f.Exec(t, `UPDATE ratelimit.rules SET from_us = from_us - 3600000000 WHERE of <> 'pause'`)
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
		f.Exec(t, `UPDATE ratelimit.buckets SET value = 1800, capacity = 5000, ts = (extract(epoch FROM now() - interval '40 seconds') * 1000000)::bigint
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
