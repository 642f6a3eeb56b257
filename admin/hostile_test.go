package admin_test

import (
	"html"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/admin"
	"github.com/pgratelimit/pgratelimit/internal/test/admintest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

var (
	scripts = regexp.MustCompile(`(?i)<script[^>]*>`)
	title   = regexp.MustCompile(`<title>(.*?)</title>`)
	// attribute matches the attribute in which a form holds the unchanged key.
	attribute = regexp.MustCompile(` value="[^"]*"`)
	inline    = regexp.MustCompile(`(?i)<[^>]*\s(on\w+|style)=`)
)

// hidden are characters that hide or turn around other text.
const hidden = "\u202e\u200b\u2066"

// TestHostileKeysAreText opens each page that can show a key, and requires that the key is text there and breaks no
// markup.
func TestHostileKeysAreText(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for _, key := range hostile {
		f.Take(t, messages.For(key).Cost(50), tokens.For(key).Cost(120_000))
		r, err := f.Limiter.Reserve(t.Context(), tokens.For(key).Cost(80_000))
		require.NoError(t, err)
		edit := rules.Edit{Author: key, Reason: key}
		_, err = f.Store.Override(t.Context(), edit, rules.Override{Limit: "messages", Key: key, Multiplier: 2})
		require.NoError(t, err)
		_, err = f.Store.Pause(t.Context(), edit, rules.Pause{Limit: "messages", Key: key, Until: time.Now().Add(time.Hour)})
		require.NoError(t, err)
		f.Exec(t, `INSERT INTO ratelimit.refusals VALUES (date_trunc('minute', now()), 'messages', 'x', $1, false, 7, 7, 1)`, key)
		f.isShownAsText(key, admintest.Address("key", "limit", "messages", "key", key))
		f.isShownAsText(key, admintest.Address("reservation", "id", r.ID))
	}
	f.Load(t)
	for _, page := range []string{
		admintest.Address("limit", "name", "messages"), admintest.Address("limit", "name", "llm/tokens"), "/admin/overrides", "/admin/history",
		admintest.Address("reservations", "state", ""),
	} {
		for _, key := range hostile {
			f.isShownAsText(key, page)
		}
	}
	for _, key := range hostile {
		require.Equal(t, http.StatusNotFound, f.get(admintest.Address("limit", "name", key[:min(len(key), 64)])).status)
		f.Exec(t, `INSERT INTO ratelimit.refusals VALUES (date_trunc('minute', now()), $1, 'x', 'ada', false, 7, 7, 1)`, key[:min(len(key), 64)])
		got := f.get(admintest.Address("limit", "name", key[:min(len(key), 64)]))
		require.Equal(t, http.StatusOK, got.status, "it was refused")
		f.isHarmless(got)
		f.isHarmless(f.get(admintest.Address("limit", "name", "messages", "prefix", key)))
		f.isHarmless(f.post("/admin/find", "limit", "messages", "typed", key))
		f.isHarmless(f.get(admintest.Address("reservation", "id", key)))
		f.isHarmless(f.get(admintest.Address("history", "limit", key[:min(len(key), 64)], "of", key)))
		f.isHarmless(f.get(admintest.Address("rule", "limit", key[:min(len(key), 64)], "plan", key[:min(len(key), 64)])))
		f.isHarmless(f.get(admintest.Address("preview", "limit", "messages", "plan", "", "rate", key, "description", key, key, key)))
		f.isHarmless(f.get(admintest.Address("preview-override", "limit", "messages", "key", key, "says", "on_plan", "on_plan", key, "rate", key)))
		require.NotContains(t, f.log.String(), key)
	}
}

// isShownAsText checks that a page shows a key, and only as text.
func (f *fixture) isShownAsText(key, page string) {
	f.Helper()
	got := f.get(page)
	require.Equal(f, http.StatusOK, got.status, page)
	f.isHarmless(got)
	require.False(f, strings.ContainsAny(attribute.ReplaceAllString(got.body, ""), hidden), "what is hidden is spelled out on %s", page)
	require.NotContains(f, title.FindString(got.body), html.EscapeString(key))
	text, codes := admin.Spell(key)
	shown := strings.ReplaceAll(html.UnescapeString(regexp.MustCompile(`<span class="code"[^>]*>[^<]*</span>`).ReplaceAllString(got.body, "")), "\ufffd", "")
	require.Contains(f, shown, text, page)
	for _, code := range codes {
		require.Contains(f, html.UnescapeString(got.body), ">"+code+"</span>", page)
	}
}

// isHarmless checks that an answer has no script but the page's own.
func (f *fixture) isHarmless(got answer) {
	f.Helper()
	require.Less(f, got.status, http.StatusInternalServerError)
	if got.header.Get("Content-Type") != "text/html; charset=utf-8" {
		return
	}
	require.Equal(f, []string{`<script type="module" src="admin.js">`}, scripts.FindAllString(got.body, -1))
	require.NotContains(f, strings.ToLower(got.body), "<img")
	require.False(f, inline.MatchString(strings.ReplaceAll(got.body, html.EscapeString(hostile[2]), "")))
}

func TestSpell(t *testing.T) {
	t.Parallel()
	for key, want := range map[string]struct {
		text  string
		codes []string
	}{
		"ada":           {"ada", nil},
		"a b":           {"a b", nil},
		" a ":           {"a", []string{"U+0020", "U+0020"}},
		"a\u202eb":      {"ab", []string{"U+202E"}},
		"\x00\n\t":      {"", []string{"U+0000", "U+000A", "U+0009"}},
		"\xff":          {"", []string{"FF"}},
		"日本\u3000x":     {"日本x", []string{"U+3000"}},
		hidden:          {"", []string{"U+202E", "U+200B", "U+2066"}},
		"<b>\ufffd</b>": {"<b>\ufffd</b>", nil},
	} {
		text, codes := admin.Spell(key)
		require.Equal(t, want.text, text, "%q", key)
		require.Equal(t, want.codes, codes, "%q", key)
	}
}

func TestWords(t *testing.T) {
	t.Parallel()
	for n, want := range map[float64]string{
		0: "0", 1: "1", 0.5: "0.5", 12.345: "12.35", 123.46: "123.5", 1234567: "1,234,567", -45000: "-45,000", -0.25: "-0.25",
		1e12: "1,000,000,000,000", 1e-9: "1e-09", 999.96: "1,000",
	} {
		require.Equal(t, want, admin.Number(n))
	}
	for d, want := range map[time.Duration]string{
		0: "0 µs", 1500 * time.Microsecond: "1 ms", 2500 * time.Millisecond: "2.5 s", 59 * time.Second: "59 s", 90 * time.Second: "1 min 30 s",
		time.Hour: "1 h", 25*time.Hour + time.Minute: "1 d 1 h", 366 * ratelimit.Day: "1.0 years",
	} {
		require.Equal(t, want, admin.Span(d))
	}
}
