package httplimit_test

import (
	"cmp"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/httplimit"
)

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
		"Honest":                    {lines: [][2]string{xff(client)}},
		"ThroughTwoProxies":         {lines: [][2]string{xff(client + ", " + edge)}},
		"TwoProxiesALineEach":       {lines: [][2]string{xff(client), xff(edge)}},
		"ForgedLeftmost":            {lines: [][2]string{xff(victim + ", " + client + ", " + edge)}},
		"ForgedLine":                {lines: [][2]string{xff(victim), xff(client + ", " + edge)}},
		"ForgedLines":               {lines: [][2]string{xff(victim), xff(victim), xff(client), xff(edge)}},
		"ForgedTrustedAddresses":    {lines: [][2]string{xff("10.0.0.9, 10.0.0.8, " + client)}},
		"ForgedGarbage":             {lines: [][2]string{xff("';drop table, \x7f, " + client)}},
		"ForgedQuote":               {lines: [][2]string{xff(`"` + victim + `, ` + client)}},
		"ForgedEmptyElements":       {lines: [][2]string{xff(",, ,"), xff(", ," + client)}},
		"ForgedInLowerCase":         {lines: [][2]string{{"x-forwarded-for", victim}, xff(client)}},
		"ForgedForwarded":           {lines: [][2]string{{"Forwarded", "for=" + victim}, xff(client)}},
		"ForgedRealIP":              {lines: [][2]string{{"X-Real-Ip", victim}, {"Cf-Connecting-Ip", victim}, xff(client)}},
		"WithoutSpaces":             {lines: [][2]string{xff(victim + "," + client + "," + edge)}},
		"WithSpacesAndTabs":         {lines: [][2]string{xff("  " + client + "\t ,\t" + edge + " ")}},
		"WithPorts":                 {lines: [][2]string{xff(client + ":50001, " + edge + ":443")}},
		"V4Mapped":                  {lines: [][2]string{xff("::ffff:" + client)}},
		"V4MappedInHexadecimal":     {lines: [][2]string{xff("[::ffff:cb00:7107]:80")}},
		"V4MappedProxies":           {peer: "[::ffff:10.0.0.1]:443", lines: [][2]string{xff(client + ", ::ffff:" + edge)}},
		"V4MappedProxyWithZone":     {lines: [][2]string{xff(client + ", ::ffff:10.0.0.3%eth0")}},
		"IPv6":                      {lines: [][2]string{xff("2001:db8:0:7::1")}, want: "2001:db8:0:7::/64"},
		"IPv6InBrackets":            {lines: [][2]string{xff("[2001:db8:0:7:1:2:3:4]")}, want: "2001:db8:0:7::/64"},
		"IPv6WithPort":              {lines: [][2]string{xff("[2001:DB8:0:7::9]:443")}, want: "2001:db8:0:7::/64"},
		"IPv6WithZone":              {lines: [][2]string{xff("2001:db8:0:7::9%eth0")}, want: "2001:db8:0:7::/64"},
		"AroundTheProxies":          {peer: client + ":1", lines: [][2]string{xff(victim)}},
		"AroundTheProxiesAsOne":     {peer: client + ":1", lines: [][2]string{xff(victim + ", 10.0.0.1")}},
		"AroundTheProxiesOverIPv6":  {peer: "[2001:db8:0:7::5]:9", lines: [][2]string{xff(victim)}, want: "2001:db8:0:7::/64"},
		"AroundTheProxiesV4Mapped":  {peer: "[::ffff:" + client + "]:1", lines: [][2]string{xff(victim)}},
		"NoHeader":                  {err: httplimit.ErrNoKey},
		"OnlyProxies":               {lines: [][2]string{xff("10.0.0.7, " + edge)}, err: httplimit.ErrNoKey},
		"UnixSocket":                {peer: "@", lines: [][2]string{xff(client)}, err: httplimit.ErrNoKey},
		"GarbageForTheClient":       {lines: [][2]string{xff(victim + ", unknown")}, err: httplimit.ErrBadKey},
		"GarbageBetweenProxies":     {lines: [][2]string{xff(client + ", unix:, " + edge)}, err: httplimit.ErrBadKey},
		"TheProxyKnewNobody":        {lines: [][2]string{xff(victim + ", ")}, err: httplimit.ErrBadKey},
		"TheProxyKnewNobodyTwice":   {lines: [][2]string{xff(client), xff("")}, err: httplimit.ErrBadKey},
		"TheProxyWroteTheWildcard":  {lines: [][2]string{xff(victim + ", 0.0.0.0")}, err: httplimit.ErrBadKey},
		"TheProxyWroteTheWildcard6": {lines: [][2]string{xff(victim + ", [::]:80")}, err: httplimit.ErrBadKey},
		"TwoAddressesInOneElement":  {lines: [][2]string{xff(victim + " " + client)}, err: httplimit.ErrBadKey},
		"OctalDigits":               {lines: [][2]string{xff("0313.0.0161.7")}, err: httplimit.ErrBadKey},
	})
}

func TestSpoofingXForwardedForBehindACount(t *testing.T) {
	t.Parallel()
	checkSpoofs(t, httplimit.XForwardedFor(httplimit.Proxies{Count: 2}), map[string]spoof{
		"AsManyAsCounted":      {lines: [][2]string{xff(client + ", " + edge)}},
		"ALineEach":            {lines: [][2]string{xff(client), xff(edge)}},
		"More":                 {lines: [][2]string{xff(victim + ", " + victim + ", " + client + ", " + edge)}},
		"MoreLines":            {lines: [][2]string{xff(victim), xff(client), xff(edge)}},
		"ForgedGarbage":        {lines: [][2]string{xff(`for="x, ,,`), xff(client + ", " + edge)}},
		"ForgedQuote":          {lines: [][2]string{xff(`"` + victim + ", " + client + ", " + edge)}},
		"V4Mapped":             {lines: [][2]string{xff("::ffff:" + client + ", " + edge)}},
		"OverAUnixSocket":      {peer: "@", lines: [][2]string{xff(client + ", " + edge)}},
		"Fewer":                {lines: [][2]string{xff(client)}, err: httplimit.ErrNoKey},
		"NoHeader":             {err: httplimit.ErrNoKey},
		"TheInnerKnewNobody":   {lines: [][2]string{xff(victim + ", " + client + ", ")}, err: httplimit.ErrBadKey},
		"TheOuterKnewNobody":   {lines: [][2]string{xff(victim + ", , " + edge)}, err: httplimit.ErrBadKey},
		"GarbageForTheClient":  {lines: [][2]string{xff(victim + ", unknown, " + edge)}, err: httplimit.ErrBadKey},
		"NobodyBefore":         {lines: [][2]string{xff("," + edge)}, err: httplimit.ErrBadKey},
		"GarbageForTheOuter":   {lines: [][2]string{xff(client + ", unknown")}, err: httplimit.ErrBadKey},
		"APortThatIsTooLong":   {lines: [][2]string{xff(client + ":123456, " + edge)}, err: httplimit.ErrBadKey},
		"APortThatIsNone":      {lines: [][2]string{xff(client + ":, " + edge)}, err: httplimit.ErrBadKey},
		"BracketsNotClosed":    {lines: [][2]string{xff("[2001:db8::1, " + edge)}, err: httplimit.ErrBadKey},
		"BracketsAroundIPv4":   {lines: [][2]string{xff("[" + client + "], " + edge)}, err: httplimit.ErrBadKey},
		"WordsAfterTheBracket": {lines: [][2]string{xff("[2001:db8::1]x, " + edge)}, err: httplimit.ErrBadKey},
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

func TestSpoofingPeer(t *testing.T) {
	t.Parallel()
	checkSpoofs(t, httplimit.Peer, map[string]spoof{
		"HeadersAreIgnored": {peer: client + ":4000", lines: [][2]string{xff(victim), {"Forwarded", "for=" + victim}, {"X-Real-Ip", victim}}},
		"V4Mapped":          {peer: "[::ffff:" + client + "]:4000"},
		"WithoutPort":       {peer: client},
		"IPv6":              {peer: "[2001:db8:0:7:ffff::1]:4000", want: "2001:db8:0:7::/64"},
		"IPv6WithZone":      {peer: "[fe80::1%eth0]:4000", want: "fe80::/64"},
		"UnixSocket":        {peer: "@", err: httplimit.ErrNoKey},
	})
}
