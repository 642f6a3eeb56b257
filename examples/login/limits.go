package main

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// Every attempt takes one token from each of these limits before the password is looked at, in one call
// that takes from all three or from none.
//
//nolint:gochecknoglobals // a Limit is a value that nothing changes, as a compiled regexp is
var (
	// perAccount stops many guesses at one password, from however many addresses: 5 at once, then one
	// every 3 minutes. Nobody can make it stricter by trying more, because a refusal costs nothing.
	perAccount = ratelimit.Define("login.account", ratelimit.TokenBucket{Rate: 20, Period: time.Hour, Capacity: 5})

	// perClient stops one client that tries many accounts: 30 at once, then one every 30 seconds. An office
	// behind one address shares it.
	perClient = ratelimit.Define("login.client", ratelimit.TokenBucket{Rate: 120, Period: time.Hour, Capacity: 30})

	// overall stops a botnet that tries every account from everywhere. Whoever fills it shuts everybody
	// out, so it has to be far above the busiest honest minute.
	overall = ratelimit.Define("login.all", ratelimit.TokenBucket{Rate: 300, Period: time.Minute, Capacity: 1000})
)

const maxLoginBytes = 254 // the longest address that mail can be sent to

// accountOf returns the one form of what a person may type as their login. The same form finds the user
// and names the bucket, so that "Ada" and "ada " are one account with one limit.
func accountOf(typed string) (string, error) {
	account := norm.NFC.String(strings.ToLower(strings.TrimSpace(typed)))
	switch {
	case account == "":
		return "", errors.New("the login is empty")
	case len(account) > maxLoginBytes:
		return "", fmt.Errorf("the login has more than %d bytes", maxLoginBytes)
	case !utf8.ValidString(typed) || strings.ContainsFunc(account, unicode.IsControl):
		return "", errors.New("the login is not text")
	}
	return account, nil
}

// clientOf returns who is at the other end of the connection: an IPv4 address, or the /64 of an IPv6 one,
// which is what one household or one rented server has all of.
//
// It is the TCP peer and nothing else: headers such as X-Forwarded-For are the client's to write. Behind a
// proxy every peer is that proxy; there, take the address from the header the proxy sets, after checking
// that the peer is the proxy.
func clientOf(remoteAddr string) (string, error) {
	peer, err := netip.ParseAddrPort(remoteAddr)
	if err != nil {
		return "", fmt.Errorf("read the client's address: %w", err)
	}
	addr := peer.Addr().Unmap().WithZone("") // ::ffff:192.0.2.1 is 192.0.2.1; a zone is ours, not the client's
	if addr.Is4() {
		return addr.String(), nil
	}
	network, err := addr.Prefix(64)
	if err != nil {
		return "", fmt.Errorf("read the client's network: %w", err)
	}
	return network.String(), nil
}
