package httplimit_test

import (
	"errors"
	"net/http"
	"net/netip"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

func TestClientIP(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		bits httplimit.Bits
		peer string
		want string
	}{
		"IPv6By64":       {httplimit.Bits{}, "[2001:db8:1:2ff:3::4]:1", "2001:db8:1:2ff::/64"},
		"IPv6By56":       {httplimit.Bits{IPv6: 56}, "[2001:db8:1:2ff:3::4]:1", "2001:db8:1:200::/56"},
		"IPv6By48":       {httplimit.Bits{IPv6: 48}, "[2001:db8:1:2ff:3::4]:1", "2001:db8:1::/48"},
		"IPv4Whole":      {httplimit.Bits{IPv6: 48}, "203.0.113.7:1", "203.0.113.7"},
		"IPv4By24":       {httplimit.Bits{IPv4: 24}, "203.0.113.7:1", "203.0.113.0/24"},
		"NAT64IsIPv4":    {httplimit.Bits{}, "[64:ff9b::203.0.113.7]:1", "203.0.113.7"},
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
