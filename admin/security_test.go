package admin_test

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/admin"
	"github.com/pgratelimit/pgratelimit/internal/test/admintest"
)

// filled returns a form that each change would take.
func (f *fixture) filled() map[string][]string {
	f.Helper()
	id := f.Furnish(f)
	bucket := []string{"limit", "messages", "key", "ada", "reason", "a test"}
	with := func(pairs ...string) []string { return append(append([]string(nil), bucket...), pairs...) }
	rule := []string{
		"limit", "messages", "plan", "", "rate", "70", "period", "1m",
		"kind", "token bucket", "mode", "on", "on_change", "keep", "reason", "a test", "version", "",
	}
	return map[string][]string{
		"reset":           with("plan", " "),
		"credit":          with("plan", "pro", "tokens", "3"),
		"cancel":          {"id", id},
		"pause":           with("for", "2h"),
		"resume":          {"limit", "messages", "key", "dmitri", "reason", "a test"},
		"override":        with("says", "multiplier", "multiplier", "3", "for", "1d"),
		"remove-override": with(),
		"put-rule":        rule,
		"delete-rule":     {"limit", "messages", "plan", "pro", "reason", "a test", "version", "1"},
	}
}

// written returns what all tables say.
func (f *fixture) written() (text string) {
	f.Helper()
	require.NoError(f, f.Pool.QueryRow(f.Context(), `SELECT concat_ws('|',
		(SELECT string_agg(b::text, ';' ORDER BY b::text) FROM ratelimit.buckets b),
		(SELECT string_agg(r::text, ';' ORDER BY r::text) FROM ratelimit.reservations r),
		(SELECT string_agg(r::text, ';' ORDER BY r::text) FROM ratelimit.rules r))`).Scan(&text))
	return text
}

// TestReadOnlyVisitorsChangeNothing sends each change in each forbidden way, and then in the allowed way.
func TestReadOnlyVisitorsChangeNothing(t *testing.T) {
	t.Parallel()
	f := setup(t)
	forms := f.filled()
	_, _, changes := f.handler(f.Set).Routes()
	require.Len(t, forms, len(changes), "each change has a form here")
	before := f.written()
	headers := func(pairs ...string) func(*http.Request) {
		return func(r *http.Request) {
			r.Header.Del("Sec-Fetch-Site")
			r.Header.Del("Origin")
			for i := 0; i < len(pairs); i += 2 {
				r.Header.Set(pairs[i], pairs[i+1])
			}
		}
	}
	for _, name := range changes {
		require.Contains(t, forms, name)
		form := admintest.Values(forms[name]...)
		for why, change := range map[string]func(*http.Request){
			"another site":                 headers("Sec-Fetch-Site", "cross-site", "Origin", "https://evil.example"),
			"a neighbour of the site":      headers("Sec-Fetch-Site", "same-site", "Origin", "https://blog.example"),
			"an older browser, elsewhere":  headers("Origin", "https://evil.example"),
			"a sandboxed frame":            headers("Origin", "null"),
			"a browser that tells nothing": headers(),
		} {
			got := f.do(http.MethodPost, "/admin/"+name, form, change)
			require.Equal(t, http.StatusForbidden, got.status, "%s from %s", name, why)
			require.Contains(t, got.body, "changes nothing")
		}
		for _, method := range []string{http.MethodGet, http.MethodHead, http.MethodPut, http.MethodDelete} {
			got := f.do(method, "/admin/"+name+"?"+form.Encode(), nil)
			require.Equal(t, http.StatusMethodNotAllowed, got.status, "%s of %s", method, name)
			require.Equal(t, "POST", got.header.Get("Allow"))
		}
		got := f.do(http.MethodPost, "/admin/"+name+"?"+form.Encode(), admintest.Values())
		require.NotEqual(t, http.StatusSeeOther, got.status, "%s with its form in the address", name)

		for _, who := range []admin.Identity{{Name: reader}, {Name: " ", MayChange: true}} {
			f.who = who
			got := f.do(http.MethodPost, "/admin/"+name, form)
			require.Equal(t, http.StatusForbidden, got.status, name)
			require.Contains(t, got.body, "You cannot make changes.")
		}
		f.who = admin.Identity{Name: operator, MayChange: true}
	}
	require.Equal(t, before, f.written())

	for _, name := range changes {
		got := f.do(http.MethodPost, "/admin/"+name, admintest.Values(forms[name]...), headers("Origin", f.server.URL))
		require.Equal(t, http.StatusSeeOther, got.status, "%s from the page: %s", name, got.body)
	}
	require.NotEqual(t, before, f.written())
}

func TestEachAnswerHasThePolicy(t *testing.T) {
	t.Parallel()
	f := setup(t)
	read, _, _ := f.handler(f.Set).Routes()
	for _, name := range append(read, "nothing") {
		header := f.get("/admin/" + name).header
		require.Equal(t, "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "+
			"form-action 'self'; frame-ancestors 'none'; base-uri 'none'", header.Get("Content-Security-Policy"), name)
		require.Equal(t, "nosniff", header.Get("X-Content-Type-Options"))
		require.Equal(t, "same-origin", header.Get("Referrer-Policy"), "the address of a page may have a key")
		if name != "admin.css" && name != "admin.js" && name != "ratelimit.js" {
			require.Equal(t, "no-store", header.Get("Cache-Control"), name)
		}
	}
}

// TestReadOnlyOffersNoForm looks for buttons that would be refused.
func TestReadOnlyOffersNoForm(t *testing.T) {
	t.Parallel()
	f := setup(t)
	id := f.Furnish(t)
	f.who = admin.Identity{Name: reader}
	_, _, changes := f.handler(f.Set).Routes()
	for name, page := range admintest.Pages(id) {
		got := f.get(page)
		require.Contains(t, got.body, "read-only", name)
		for _, change := range changes {
			require.NotContains(t, got.body, `action="`+change+`"`, name)
		}
	}
}
