package httplimit_test

import (
	"errors"
	"net/url"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
)

// FuzzKeys holds the keys of what a request says to what the table can store, and keys that are joined to being different where
// one of their values is.
func FuzzKeys(f *testing.F) {
	f.Add("a|b", "c", "a", "b|c")
	f.Add("", "\x00", "\xff", strings.Repeat("x", 300))
	f.Add("sha256:x", "é", "sha256:x", "e")
	a, b := httplimit.Header("X-A"), httplimit.Header("X-B")
	of := func(t *testing.T, key httplimit.Key, one, other string) string {
		t.Helper()
		r := from(balancer)
		r.Header["X-A"], r.Header["X-B"] = []string{one}, []string{other}
		r.URL.RawQuery = url.Values{"q": {one}}.Encode()
		got, err := key.Of(r)
		if err != nil {
			require.Empty(t, got)
			require.True(t, errors.Is(err, httplimit.ErrNoKey) || errors.Is(err, httplimit.ErrBadKey), "%v", err)
			return ""
		}
		require.True(t, len(got) >= 1 && len(got) <= 256 && utf8.ValidString(got) && !strings.Contains(got, "\x00"), "%q", got)
		return got
	}
	f.Fuzz(func(t *testing.T, one, other, another, yetAnother string) {
		for name, key := range map[string]httplimit.Key{
			"Header": a, "Query": httplimit.Query("q"), "FirstOf": httplimit.FirstOf(a, httplimit.Query("q")),
		} {
			x, y := of(t, key, one, ""), of(t, key, another, "")
			require.Equal(t, one == "", x == "", name)
			require.Equal(t, one == another, x == y, "%s: of values that differ", name)
		}
		joined := httplimit.Join(a, b)
		x, y := of(t, joined, one, other), of(t, joined, another, yetAnother)
		require.Equal(t, one == "" || other == "", x == "")
		if x != "" && y != "" {
			require.Equal(t, one == another && other == yetAnother, x == y)
		}
	})
}
