package httplimit

import (
	"fmt"
	"net/http"
	"net/netip"
	"strings"

	"github.com/pgratelimit/pgratelimit/internal/address"
)

// Source is where a client's address is read: [Peer], [XForwardedFor], [TrustedHeader], or a function of your own.
// There is no default, because none is right: behind a proxy the peer is the proxy, and without one a client can write
// any header.
//
// This package's sources return IPv4 addresses as such, even from ::ffff:192.0.2.1, and IPv6 addresses without a zone.
// Their errors wrap ErrNoKey if there is no address, and ErrBadKey if it's malformed.
type Source func(r *http.Request) (netip.Addr, error)

// Bits is how much of an address counts; addresses that have it in common are one client.
type Bits struct {
	// IPv6 is the prefix length for IPv6 addresses, from 16 to 64, because with more, one host has many buckets. Defaults
	// to 64, the smallest network, all of which one host can use; providers give customers 56 or 48.
	IPv6 int
	// IPv4 is for IPv4 addresses. Defaults to 32. From 8 to 32.
	IPv4 int
}

func (b Bits) withDefaults() Bits {
	if b.IPv6 == 0 {
		b.IPv6 = address.IPv6Bits
	}
	if b.IPv4 == 0 {
		b.IPv4 = address.IPv4Bits
	}
	return b
}

func (b Bits) validate() error {
	switch {
	case b.IPv6 < 16 || b.IPv6 > 64:
		return fmt.Errorf("Bits.IPv6 is %d; use 16 to 64, or 0 for 64", b.IPv6)
	case b.IPv4 < 8 || b.IPv4 > 32:
		return fmt.Errorf("Bits.IPv4 is %d; use 8 to 32, or 0 for 32", b.IPv4)
	}
	return nil
}

// ClientIP returns the Key that is the client's address in source, cut to bits: "203.0.113.7", "2001:db8:0:7::/64". A
// NAT64 address, in 64:ff9b::/96, counts as its IPv4 address, because all its clients share one /64; for another
// prefix, return the IPv4 address from a Source of your own. It panics if source is nil or bits is out of range.
//
// Put it in front of middleware that rewrites [http.Request.RemoteAddr].
func ClientIP(source Source, bits Bits) Key {
	if source == nil {
		panic("httplimit: ClientIP: the source is nil; say where the address is: Peer, XForwardedFor or TrustedHeader")
	}
	bits = bits.withDefaults()
	if err := bits.validate(); err != nil {
		panic("httplimit: ClientIP: " + err.Error())
	}
	return func(r *http.Request) (string, error) {
		from, err := source(r)
		if err != nil {
			return "", err
		}
		return bits.network(from)
	}
}

// network returns the text of what counts of an address.
func (b Bits) network(from netip.Addr) (string, error) {
	if !from.IsValid() {
		return "", fmt.Errorf("%w: the source returned no address", ErrNoKey)
	}
	return address.Network(from, b.IPv4, b.IPv6), nil
}

// Peer is the Source for a server that clients connect to directly: the other end of the connection. Behind a proxy
// that is the proxy, so all its clients share a bucket, and if a request has X-Forwarded-For or Forwarded, the
// middleware logs that once.
func Peer(r *http.Request) (netip.Addr, error) {
	peerIsKey(r)
	return peer(r)
}

// peer is Peer for sources that read headers, too.
func peer(r *http.Request) (netip.Addr, error) {
	if from, valid := address.Parse(r.RemoteAddr); valid {
		return from, nil
	}
	return netip.Addr{}, fmt.Errorf("%w: RemoteAddr is not an IP address, as on a Unix socket", ErrNoKey)
}

// XForwardedFor returns the Source that reads X-Forwarded-For. Each proxy adds the address of its peer to it. All
// header lines are one list, read from the right: from the proxies towards the client, and never past the client's
// address.
//
//   - Behind named proxies, the first address that is not a proxy's is the client. The connection's peer comes first,
//     so a client that connects directly is identified by its connection.
//   - Behind a count of proxies, the client is the address that many places from the right. The peer is not checked:
//     make sure that only the proxies can connect.
//
// The request is refused if the list has an invalid element before the client (ErrBadKey: an empty element, "unknown",
// a name, 0.0.0.0), because the client may have written everything left of it. It is also refused if the list ends
// before the client (ErrNoKey: no header, only proxies, fewer elements than the count), because all clients of a proxy
// would share the bucket of its address. So put requests of the proxies themselves, such as health checks, on a route
// without this key.
//
// Addresses may have ports, and IPv6 ones brackets. It panics if proxies is invalid.
func XForwardedFor(proxies Proxies) Source {
	p := proxies.checked("XForwardedFor")
	return func(r *http.Request) (netip.Addr, error) {
		if p.Count == 0 {
			if from, err := peer(r); err != nil || !p.trusts(from) {
				return from, err
			}
		}
		client, err := p.walk(r.Header.Values("X-Forwarded-For"))
		if err != nil {
			return netip.Addr{}, fmt.Errorf("%w in X-Forwarded-For", err)
		}
		return client, nil
	}
}

// TrustedHeader returns the Source that reads the one address in a header, such as CF-Connecting-IP, if the connection
// comes from trusted. Otherwise it ignores the header, and the peer is the client. The proxies must overwrite the
// header: the request is refused if it has a second line or an invalid address (ErrBadKey), or is absent (ErrNoKey).
//
// It panics if the name is empty, or if trusted is empty or trusts every address.
func TrustedHeader(name string, trusted ...netip.Prefix) Source {
	mustName("TrustedHeader", name)
	proxies := Proxies{Trusted: trusted}.checked("TrustedHeader")
	return func(r *http.Request) (netip.Addr, error) {
		from, err := peer(r)
		if err != nil || !proxies.trusts(from) {
			return from, err
		}
		values := r.Header.Values(name)
		switch len(values) {
		case 0:
			return netip.Addr{}, fmt.Errorf("%w: the proxy sent no header %.80q", ErrNoKey, name)
		case 1:
			if client, ok := address.Parse(strings.Trim(values[0], " \t")); ok {
				return client, nil
			}
			return netip.Addr{}, fmt.Errorf("%w: header %.80q is not one IP address", ErrBadKey, name)
		}
		return netip.Addr{}, fmt.Errorf("%w: header %.80q is given twice", ErrBadKey, name)
	}
}

// walk returns the client's address in the list, which is lines from left to right.
func (p Proxies) walk(lines []string) (netip.Addr, error) {
	var elements []string
	for _, line := range lines {
		elements = append(elements, strings.Split(line, ",")...)
	}
	for hop := 1; hop <= len(elements); hop++ { // from the right, where the proxies write
		parsed, valid := address.Parse(strings.Trim(elements[len(elements)-hop], " \t"))
		switch {
		case !valid:
			return netip.Addr{}, fmt.Errorf("%w: element %d from the right is not an IP address", ErrBadKey, hop)
		case p.Count == 0 && !p.trusts(parsed), p.Count == hop:
			return parsed, nil
		}
	}
	if p.Count == 0 {
		return netip.Addr{}, fmt.Errorf("%w: no address but of proxies", ErrNoKey)
	}
	return netip.Addr{}, fmt.Errorf("%w: fewer than %d addresses", ErrNoKey, p.Count)
}
