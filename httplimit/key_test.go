package httplimit_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
)

type (
	userKey  struct{}
	userID   int64
	userName string
)

// text returns a Key that is always value.
func text(value string) httplimit.Key {
	return func(*http.Request) (string, error) { return value, nil }
}

// with returns a request whose context has value under userKey.
func with(value any) *http.Request {
	r := from(balancer)
	return r.WithContext(context.WithValue(r.Context(), userKey{}, value))
}

func TestKey(t *testing.T) {
	t.Parallel()
	get := func(target string) *http.Request { return httptest.NewRequest(http.MethodGet, target, nil) }
	path := func(value string) *http.Request {
		r := get("/")
		r.SetPathValue("team", value)
		return r
	}
	header, cookie := httplimit.Header("X-Api-Key"), httplimit.Cookie("user")
	query, team, user := httplimit.Query("user"), httplimit.PathValue("team"), httplimit.ContextValue(userKey{})
	apiKey := func(value string) [2]string { return [2]string{"x-api-key", value} }
	cookies := func(value string) [2]string { return [2]string{"Cookie", value} }

	for name, test := range map[string]struct {
		key     httplimit.Key
		request *http.Request
		want    string
		err     error
	}{
		"Header":                  {key: header, request: from(balancer, apiKey("k1")), want: "k1"},
		"HeaderTwiceTheSame":      {key: header, request: from(balancer, apiKey("k1"), apiKey("k1")), want: "k1"},
		"HeaderTwice":             {key: header, request: from(balancer, apiKey("k1"), apiKey("k2")), err: httplimit.ErrBadKey},
		"HeaderTwiceOnceEmpty":    {key: header, request: from(balancer, apiKey("k1"), apiKey("")), err: httplimit.ErrBadKey},
		"HeaderEmpty":             {key: header, request: from(balancer, apiKey("")), err: httplimit.ErrNoKey},
		"HeaderAbsent":            {key: header, request: from(balancer), err: httplimit.ErrNoKey},
		"Cookie":                  {key: cookie, request: from(balancer, cookies("a=b; user=ada")), want: "ada"},
		"CookieTwice":             {key: cookie, request: from(balancer, cookies("user=ada"), cookies("user=bob")), err: httplimit.ErrBadKey},
		"CookieEmpty":             {key: cookie, request: from(balancer, cookies("user=")), err: httplimit.ErrNoKey},
		"CookieAbsent":            {key: cookie, request: from(balancer), err: httplimit.ErrNoKey},
		"Query":                   {key: query, request: get("/?user=ada%20l"), want: "ada l"},
		"QueryTwice":              {key: query, request: get("/?user=ada&user=bob"), err: httplimit.ErrBadKey},
		"QueryEmpty":              {key: query, request: get("/?user="), err: httplimit.ErrNoKey},
		"QueryAbsent":             {key: query, request: get("/"), err: httplimit.ErrNoKey},
		"PathValue":               {key: team, request: path("blue"), want: "blue"},
		"PathValueOutsideTheMux":  {key: team, request: get("/"), err: httplimit.ErrNoKey},
		"ContextString":           {key: user, request: with("ada"), want: "ada"},
		"ContextNamedString":      {key: user, request: with(userName("ada")), want: "ada"},
		"ContextNumber":           {key: user, request: with(userID(42)), want: "42"},
		"ContextUnsigned":         {key: user, request: with(uint8(42)), want: "42"},
		"ContextStringer":         {key: user, request: with(netip.MustParseAddr(client)), want: client},
		"ContextEmptyString":      {key: user, request: with(""), err: httplimit.ErrNoKey},
		"ContextZero":             {key: user, request: with(userID(0)), err: httplimit.ErrNoKey},
		"ContextNilStringer":      {key: user, request: with((*http.Cookie)(nil)), err: httplimit.ErrNoKey},
		"ContextAbsent":           {key: user, request: get("/"), err: httplimit.ErrNoKey},
		"ContextOfAnotherType":    {key: user, request: with(1.5), err: httplimit.ErrBadKey},
		"Empty":                   {key: text(""), request: get("/"), err: httplimit.ErrNoKey},
		"Nil":                     {key: nil, request: get("/"), err: httplimit.ErrNoKey},
		"JoinWithAPartMissing":    {key: httplimit.Join(text("a"), header), request: get("/"), err: httplimit.ErrNoKey},
		"JoinWithAnEmptyPart":     {key: httplimit.Join(text("a"), text("")), request: get("/"), err: httplimit.ErrNoKey},
		"JoinWithABadPart":        {key: httplimit.Join(text("a"), query), request: get("/?user=a&user=b"), err: httplimit.ErrBadKey},
		"FirstOfNone":             {key: httplimit.FirstOf(header, query), request: get("/"), err: httplimit.ErrNoKey},
		"FirstOfStopsAtABadKey":   {key: httplimit.FirstOf(query, text("a")), request: get("/?user=a&user=b"), err: httplimit.ErrBadKey},
		"FirstOfSkipsAnEmptyKey":  {key: httplimit.FirstOf(text(""), text("a")), request: get("/"), want: "1|a"},
		"FirstOfSaysWhich":        {key: httplimit.FirstOf(user, text(client)), request: with(client), want: "0|" + client},
		"FirstOfSaysWhichOther":   {key: httplimit.FirstOf(user, text(client)), request: get("/"), want: "1|" + client},
		"FirstOfCannotBeImitated": {key: httplimit.FirstOf(user, text(client)), request: with("1|" + client), want: `0|1\|` + client},
	} {
		got, err := test.key.Of(test.request)
		require.ErrorIs(t, err, test.err, name)
		require.Equal(t, test.want, got, name)
	}
	_, err := header.Of(from(balancer, apiKey("secret1"), apiKey("secret2")))
	require.ErrorContains(t, err, `"X-Api-Key"`)
	require.NotContains(t, err.Error(), "secret")
	down := errors.New("the directory is down")
	failing := httplimit.Key(func(*http.Request) (string, error) { return "half", down })
	for _, key := range []httplimit.Key{failing, httplimit.Join(text("a"), failing), httplimit.FirstOf(failing, text("a"))} {
		got, err := key.Of(get("/"))
		require.ErrorIs(t, err, down)
		require.Empty(t, got)
	}
}

// TestJoinNeverCollides promises different keys for different parts. FuzzJoin of package ratelimit tests more of them.
func TestJoinNeverCollides(t *testing.T) {
	t.Parallel()
	for name, pair := range map[string][2]httplimit.Key{
		"SeparatorInAPart":   {httplimit.Join(text("a|b"), text("c")), httplimit.Join(text("a"), text("b|c"))},
		"EscapeAtTheEnd":     {httplimit.Join(text(`a\`), text("b")), httplimit.Join(text(`a\|b`))},
		"Nested":             {httplimit.Join(httplimit.Join(text("a"), text("b")), text("c")), httplimit.Join(text("a"), text("b"), text("c"))},
		"NestedElsewhere":    {httplimit.Join(text("a"), httplimit.Join(text("b"), text("c"))), httplimit.Join(httplimit.Join(text("a"), text("b")), text("c"))},
		"TooLongTogether":    {httplimit.Join(text(strings.Repeat("a", 200)), text(strings.Repeat("b", 100))), httplimit.Join(text(strings.Repeat("a", 200)+"b"), text(strings.Repeat("b", 99)))},
		"OneOfEachOfFirstOf": {httplimit.Join(httplimit.FirstOf(text("a")), text("b")), httplimit.Join(httplimit.FirstOf(text(""), text("a")), text("b"))},
	} {
		one, err := pair[0].Of(nil)
		require.NoError(t, err, name)
		other, err := pair[1].Of(nil)
		require.NoError(t, err, name)
		require.NotEqual(t, one, other, name)
		require.LessOrEqual(t, max(len(one), len(other)), 256, name)
	}
}

func ExampleFirstOf() {
	proxies, err := httplimit.ParseProxies("10.0.0.0/8")
	if err != nil {
		panic(err)
	}
	// By user when one is signed in, else by address. The code in front has verified who the user is.
	key := httplimit.FirstOf(
		httplimit.ContextValue(userKey{}),
		httplimit.ClientIP(httplimit.XForwardedFor(proxies), httplimit.Bits{}),
	)
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	r.RemoteAddr = "10.0.0.1:44321"
	r.Header.Set("X-Forwarded-For", "198.51.100.1, 2001:db8:0:7::9") // the first is the client's own invention
	fmt.Println(key.Of(r))
	fmt.Println(key.Of(r.WithContext(context.WithValue(r.Context(), userKey{}, "ada"))))
	// Output:
	// 1|2001:db8:0:7::/64 <nil>
	// 0|ada <nil>
}
