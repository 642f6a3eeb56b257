package httplimit_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/middleware/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
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
		"HeaderBlank":             {key: header, request: from(balancer, apiKey(" ")), err: httplimit.ErrNoKey},
		"HeaderInSpaces":          {key: header, request: from(balancer, apiKey(" k1 "), apiKey("k1")), want: "k1"},
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

// FuzzKeys holds the keys of what a request says to what the table can store, and keys that are joined to being
// different where one of their values is.
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

func TestClientIP(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		bits httplimit.Bits
		peer string
		want string
	}{
		"IPv6By64":       {httplimit.Bits{}, "[2001:db8:1:2ff:3::4]:1", "2001:db8:1:2ff::/64"},
		"IPv6By56":       {httplimit.Bits{IPv6: 56}, "[2001:db8:1:2ff:3::4]:1", "2001:db8:1:200::/56"},
		"IPv4Whole":      {httplimit.Bits{IPv6: 48}, "203.0.113.7:1", "203.0.113.7"},
		"IPv4By24":       {httplimit.Bits{IPv4: 24}, "203.0.113.7:1", "203.0.113.0/24"},
		"V4MappedIsIPv4": {httplimit.Bits{IPv4: 24}, "[::ffff:203.0.113.7]:1", "203.0.113.0/24"},
	} {
		got, err := httplimit.ClientIP(httplimit.Peer, test.bits).Of(from(test.peer))
		require.NoError(t, err, name)
		require.Equal(t, test.want, got, name)
	}
	own := func(*http.Request) (netip.Addr, error) { return netip.MustParseAddr("::ffff:203.0.113.7%eth0"), nil }
	got, err := httplimit.ClientIP(own, httplimit.Bits{}).Of(from(balancer))
	require.NoError(t, err)
	require.Equal(t, client, got, "a source of the program's own")
	none := func(*http.Request) (netip.Addr, error) { return netip.Addr{}, nil }
	_, err = httplimit.ClientIP(none, httplimit.Bits{}).Of(from(balancer))
	require.ErrorIs(t, err, httplimit.ErrNoKey)
}

func TestMistakesOfTheProgramPanic(t *testing.T) {
	t.Parallel()
	prefixes := func(texts ...string) []netip.Prefix {
		var all []netip.Prefix
		for _, text := range texts {
			all = append(all, netip.MustParsePrefix(text))
		}
		return all
	}
	limiter, err := ratelimit.New(new(pgxpool.Pool), ratelimit.Config{})
	require.NoError(t, err)
	limited, err := httplimit.New(limiter, limits(userLimit))
	require.NoError(t, err)
	for name, construct := range map[string]func(){
		"NoSource":          func() { httplimit.ClientIP(nil, httplimit.Bits{}) },
		"BucketsForHosts":   func() { httplimit.ClientIP(httplimit.Peer, httplimit.Bits{IPv6: 128}) },
		"NegativeBits":      func() { httplimit.ClientIP(httplimit.Peer, httplimit.Bits{IPv4: -1}) },
		"TooFewBits":        func() { httplimit.ClientIP(httplimit.Peer, httplimit.Bits{IPv6: 8}) },
		"TooManyBits":       func() { httplimit.ClientIP(httplimit.Peer, httplimit.Bits{IPv4: 33}) },
		"NoProxies":         func() { httplimit.XForwardedFor(httplimit.Proxies{}) },
		"NamesAndCount":     func() { httplimit.XForwardedFor(httplimit.Proxies{Trusted: prefixes("10.0.0.0/8"), Count: 1}) },
		"NegativeCount":     func() { httplimit.XForwardedFor(httplimit.Proxies{Count: -1}) },
		"Everybody":         func() { httplimit.XForwardedFor(httplimit.Proxies{Trusted: prefixes("0.0.0.0/0")}) },
		"EverybodyV6":       func() { httplimit.XForwardedFor(httplimit.Proxies{Trusted: prefixes("::/0")}) },
		"EverybodyV4Mapped": func() { httplimit.XForwardedFor(httplimit.Proxies{Trusted: prefixes("::ffff:0:0/96")}) },
		"InvalidPrefix":     func() { httplimit.XForwardedFor(httplimit.Proxies{Trusted: make([]netip.Prefix, 1)}) },
		"HeaderOfAnybody":   func() { httplimit.TrustedHeader("CF-Connecting-IP") },
		"TrustedUnnamed":    func() { httplimit.TrustedHeader("", prefixes("10.0.0.0/8")...) },
		"FromRulesOfNone":   func() { httplimit.FromRules(nil, nil) },
		"HeaderUnnamed":     func() { httplimit.Header("") },
		"HeaderOfNobody":    func() { httplimit.Header("host") },
		"CookieUnnamed":     func() { httplimit.Cookie("") },
		"QueryUnnamed":      func() { httplimit.Query("") },
		"PathValueUnnamed":  func() { httplimit.PathValue("") },
		"ContextUnnamed":    func() { httplimit.ContextValue(nil) },
		"JoinOfNothing":     func() { httplimit.Join() },
		"JoinOfNil":         func() { httplimit.Join(text("a"), nil) },
		"FirstOfNothing":    func() { httplimit.FirstOf() },
		"NoHandler":         func() { limited(nil) },
		"NilHandlerFunc":    func() { limited(http.HandlerFunc(nil)) },
	} {
		require.Panics(t, construct, name)
	}
}

func TestParseProxies(t *testing.T) {
	t.Parallel()
	proxies, err := httplimit.ParseProxies("10.0.0.0/8", "192.0.2.80", "2001:db8::/32", "::ffff:172.16.0.0/108")
	require.NoError(t, err)
	key := httplimit.ClientIP(httplimit.XForwardedFor(proxies), httplimit.Bits{})
	got, err := key.Of(from("[2001:db8::9]:1", xff(client+", 172.16.0.9, 192.0.2.80, 10.9.9.9")))
	require.NoError(t, err)
	require.Equal(t, client, got)
	for name, texts := range map[string][]string{
		"None": nil, "Empty": {""}, "Name": {"10.0.0.0/8", "proxy.internal"}, "Everybody": {"::/0"}, "Zone": {"fe80::1%eth0"}, "Bits": {"10.0.0.0/33"},
	} {
		_, err := httplimit.ParseProxies(texts...)
		require.Error(t, err, name)
	}
}

// sameWithPrepended requires that what stands left of the client's address does not change the answer,
// whether it is in the same header line or in one before.
func sameWithPrepended(t *testing.T, key httplimit.Key, header, forged, written string) {
	t.Helper()
	want, err := key.Of(from(balancer, [2]string{header, written}))
	require.NoError(t, err)
	require.NotEmpty(t, want)
	for _, r := range []*http.Request{
		from(balancer, [2]string{header, forged + "," + written}),
		from(balancer, [2]string{header, forged + ", " + written}),
		from(balancer, [2]string{header, forged}, [2]string{header, written}),
	} {
		got, err := key.Of(r)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
}

// neverPanics requires an address or one of the two errors for any header.
func neverPanics(t *testing.T, key httplimit.Key, header, value string) {
	t.Helper()
	got, err := key.Of(from(balancer, [2]string{header, value}))
	if err == nil {
		require.NotEmpty(t, got)
		return
	}
	require.Empty(t, got)
	require.True(t, errors.Is(err, httplimit.ErrNoKey) || errors.Is(err, httplimit.ErrBadKey), "%v", err)
}

func FuzzXForwardedFor(f *testing.F) {
	for _, forged := range []string{"", ",", victim, "::ffff:1.2.3.4%x", "[::1]:80, 10.0.0.1", `"`, `\"`, "unknown", "10.0.0.2"} {
		f.Add(forged)
	}
	behindNamed := httplimit.ClientIP(httplimit.XForwardedFor(named()), httplimit.Bits{})
	behindTwo := httplimit.ClientIP(httplimit.XForwardedFor(httplimit.Proxies{Count: 2}), httplimit.Bits{})
	f.Fuzz(func(t *testing.T, forged string) {
		for _, written := range []string{client + ", " + edge, "[2001:db8:0:7::1]:80,10.0.0.3:1", "::ffff:" + client + " ,::ffff:10.0.0.3"} {
			sameWithPrepended(t, behindNamed, "X-Forwarded-For", forged, written)
			sameWithPrepended(t, behindTwo, "X-Forwarded-For", forged, written)
		}
		neverPanics(t, behindNamed, "X-Forwarded-For", forged)
		neverPanics(t, behindTwo, "X-Forwarded-For", forged)
	})
}

const (
	client   = "203.0.113.7"    // who really sends the request
	victim   = "198.51.100.1"   // whose bucket he would rather use
	balancer = "10.0.0.1:44321" // the proxy next to the server, as a peer
	edge     = "192.0.2.80"     // the proxy in front of that one
)

// from returns a request from peer with header lines, each a name and a value.
func from(peer string, lines ...[2]string) *http.Request {
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	r.RemoteAddr = peer
	for _, line := range lines {
		r.Header.Add(line[0], line[1])
	}
	return r
}

func xff(value string) [2]string { return [2]string{"X-Forwarded-For", value} }

func named() httplimit.Proxies {
	return httplimit.Proxies{Trusted: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix(edge + "/32")}}
}

// spoof is a request, and the key of the bucket that it must count against.
type spoof struct {
	peer  string // default: the balancer
	lines [][2]string
	want  string // default: the real client's bucket
	err   error
}

func checkSpoofs(t *testing.T, source httplimit.Source, spoofs map[string]spoof) {
	t.Helper()
	key := httplimit.ClientIP(source, httplimit.Bits{})
	for name, test := range spoofs {
		got, err := key.Of(from(cmp.Or(test.peer, balancer), test.lines...))
		if test.err != nil {
			require.ErrorIs(t, err, test.err, name)
			require.Empty(t, got, name)
			require.NotContains(t, err.Error(), client, "a message goes to logs, and names nobody")
			continue
		}
		require.NoError(t, err, name)
		require.Equal(t, cmp.Or(test.want, client), got, name)
	}
}

func TestSpoofingXForwardedForBehindNamedProxies(t *testing.T) {
	t.Parallel()
	checkSpoofs(t, httplimit.XForwardedFor(named()), map[string]spoof{
		"Honest":                   {lines: [][2]string{xff(client)}},
		"ThroughTwoProxies":        {lines: [][2]string{xff(client + ", " + edge)}},
		"TwoProxiesALineEach":      {lines: [][2]string{xff(client), xff(edge)}},
		"ForgedLeftmost":           {lines: [][2]string{xff(victim + ", " + client + ", " + edge)}},
		"ForgedLine":               {lines: [][2]string{xff(victim), xff(client + ", " + edge)}},
		"ForgedTrustedAddresses":   {lines: [][2]string{xff("10.0.0.9, 10.0.0.8, " + client)}},
		"ForgedGarbage":            {lines: [][2]string{xff("';drop table, \x7f, " + client)}},
		"ForgedQuote":              {lines: [][2]string{xff(`"` + victim + `, ` + client)}},
		"ForgedEmptyElements":      {lines: [][2]string{xff(",, ,"), xff(", ," + client)}},
		"ForgedForwarded":          {lines: [][2]string{{"Forwarded", "for=" + victim}, xff(client)}},
		"ForgedRealIP":             {lines: [][2]string{{"X-Real-Ip", victim}, {"Cf-Connecting-Ip", victim}, xff(client)}},
		"WithSpacesAndTabs":        {lines: [][2]string{xff("  " + client + "\t ,\t" + edge + " ")}},
		"WithPorts":                {lines: [][2]string{xff(client + ":50001, " + edge + ":443")}},
		"V4Mapped":                 {lines: [][2]string{xff("::ffff:" + client)}},
		"V4MappedProxies":          {peer: "[::ffff:10.0.0.1]:443", lines: [][2]string{xff(client + ", ::ffff:" + edge)}},
		"IPv6":                     {lines: [][2]string{xff("2001:db8:0:7::1")}, want: "2001:db8:0:7::/64"},
		"IPv6WithZone":             {lines: [][2]string{xff("2001:db8:0:7::9%eth0")}, want: "2001:db8:0:7::/64"},
		"AroundTheProxies":         {peer: client + ":1", lines: [][2]string{xff(victim)}},
		"AroundTheProxiesAsOne":    {peer: client + ":1", lines: [][2]string{xff(victim + ", 10.0.0.1")}},
		"AroundTheProxiesOverIPv6": {peer: "[2001:db8:0:7::5]:9", lines: [][2]string{xff(victim)}, want: "2001:db8:0:7::/64"},
		"NoHeader":                 {err: httplimit.ErrNoKey},
		"OnlyProxies":              {lines: [][2]string{xff("10.0.0.7, " + edge)}, err: httplimit.ErrNoKey},
		"UnixSocket":               {peer: "@", lines: [][2]string{xff(client)}, err: httplimit.ErrNoKey},
		"GarbageForTheClient":      {lines: [][2]string{xff(victim + ", unknown")}, err: httplimit.ErrBadKey},
		"GarbageBetweenProxies":    {lines: [][2]string{xff(client + ", unix:, " + edge)}, err: httplimit.ErrBadKey},
		"TheProxyKnewNobody":       {lines: [][2]string{xff(victim + ", ")}, err: httplimit.ErrBadKey},
		"TheProxyKnewNobodyTwice":  {lines: [][2]string{xff(client), xff("")}, err: httplimit.ErrBadKey},
		"TheProxyWroteTheWildcard": {lines: [][2]string{xff(victim + ", 0.0.0.0")}, err: httplimit.ErrBadKey},
	})
}

func TestSpoofingXForwardedForBehindACount(t *testing.T) {
	t.Parallel()
	checkSpoofs(t, httplimit.XForwardedFor(httplimit.Proxies{Count: 2}), map[string]spoof{
		"AsManyAsCounted":     {lines: [][2]string{xff(client + ", " + edge)}},
		"ALineEach":           {lines: [][2]string{xff(client), xff(edge)}},
		"More":                {lines: [][2]string{xff(victim + ", " + victim + ", " + client + ", " + edge)}},
		"ForgedGarbage":       {lines: [][2]string{xff(`for="x, ,,`), xff(client + ", " + edge)}},
		"ForgedQuote":         {lines: [][2]string{xff(`"` + victim + ", " + client + ", " + edge)}},
		"V4Mapped":            {lines: [][2]string{xff("::ffff:" + client + ", " + edge)}},
		"OverAUnixSocket":     {peer: "@", lines: [][2]string{xff(client + ", " + edge)}},
		"Fewer":               {lines: [][2]string{xff(client)}, err: httplimit.ErrNoKey},
		"NoHeader":            {err: httplimit.ErrNoKey},
		"TheInnerKnewNobody":  {lines: [][2]string{xff(victim + ", " + client + ", ")}, err: httplimit.ErrBadKey},
		"GarbageForTheClient": {lines: [][2]string{xff(victim + ", unknown, " + edge)}, err: httplimit.ErrBadKey},
	})
}

func TestSpoofingTrustedHeader(t *testing.T) {
	t.Parallel()
	cloudflare := func(value string) [2]string { return [2]string{"CF-Connecting-IP", value} }
	checkSpoofs(t, httplimit.TrustedHeader("CF-Connecting-IP", named().Trusted...), map[string]spoof{
		"Honest":              {lines: [][2]string{cloudflare(client)}},
		"InAnyCase":           {lines: [][2]string{{"cf-connecting-ip", " " + client + "\t"}}},
		"ForgedXForwardedFor": {lines: [][2]string{xff(victim), cloudflare(client)}},
		"V4Mapped":            {lines: [][2]string{cloudflare("::ffff:" + client)}},
		"IPv6WithZone":        {lines: [][2]string{cloudflare("2001:db8:0:7::5%1")}, want: "2001:db8:0:7::/64"},
		"AroundTheProxies":    {peer: client + ":1", lines: [][2]string{cloudflare(victim)}},
		"NoHeader":            {err: httplimit.ErrNoKey},
		"TwoLines":            {lines: [][2]string{cloudflare(victim), cloudflare(client)}, err: httplimit.ErrBadKey},
		"AList":               {lines: [][2]string{cloudflare(victim + ", " + client)}, err: httplimit.ErrBadKey},
		"Garbage":             {lines: [][2]string{cloudflare("localhost")}, err: httplimit.ErrBadKey},
		"Empty":               {lines: [][2]string{cloudflare("")}, err: httplimit.ErrBadKey},
		"UnixSocket":          {peer: "@", lines: [][2]string{cloudflare(client)}, err: httplimit.ErrNoKey},
	})
}
