package httplimit_test

import (
	"errors"
	"math"
	"net/url"
	"strconv"
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

// FuzzStatedCost holds the cost that a request states to its range.
func FuzzStatedCost(f *testing.F) {
	for _, stated := range []string{"", "5", " 7 ", "1e400", "-1e400", "NaN", "Inf", "0x1p63", "1_000", "5,6", "1;2"} {
		f.Add(stated, "2", 0.0, 0.0, 0.0)
		f.Add(stated, "x", 2.0, 3.0, 9.0)
	}
	f.Fuzz(func(t *testing.T, stated, too string, least, absent, most float64) {
		cost := httplimit.StatedCost{Header: "X-Cost", Min: least, Default: absent, Max: most}
		defer func() { // its numbers are checked when a middleware is made
			if t.Failed() {
				t.Logf("%+v", cost)
			}
		}()
		if !(least > 0 && least <= absent && absent <= most && most <= math.MaxFloat64) {
			cost.Min, cost.Default, cost.Max = 0, 0, 0
			least, absent, most = 1, 1, math.MaxFloat64
		}
		r := from(balancer)
		r.Header["X-Cost"] = []string{stated, too}
		got, err := cost.Of(r)
		require.NoError(t, err)
		require.True(t, got >= least && got <= most, "%v", got)
		n, ok := math.Inf(-1), false
		for _, text := range []string{stated, too} {
			if one, err := strconv.ParseFloat(strings.TrimSpace(text), 64); !math.IsNaN(one) && (err == nil || errors.Is(err, strconv.ErrRange)) {
				n, ok = max(n, one), true
			}
		}
		if !ok {
			require.Equal(t, absent, got)
		} else {
			require.Equal(t, min(max(n, least), most), got)
		}
	})
}
