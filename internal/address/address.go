// Package address makes the key of a client from its IP address. Every guard, the tiers of rules and the simulation use
// it, so a client has the same key everywhere.
package address

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
)

// The default number of significant bits of an address. An IPv6 network has at least a /64, and its hosts may use any
// address in it.
const (
	IPv4Bits = 32
	IPv6Bits = 64
)

// ErrNoAddress is returned by Key for other text. It doesn't contain the text, because an address is personal data.
var ErrNoAddress = errors.New("not one IP address; use the form 203.0.113.7, 203.0.113.7:443, 2001:db8::1, " +
	"[2001:db8::1]:443 or 2001:db8::/64")

// IsAttribute reports whether an attribute of a tier, or an entry of Envoy, is the client's address.
func IsAttribute(name string) bool {
	return slices.Contains([]string{"address", "remote_address", "masked_remote_address"}, name)
}

// Key returns the key of the client at an address: "203.0.113.7", "2001:db8:0:7::/64". A port and a zone don't count.
// Only the first bits count, and fewer for a prefix that is shorter, such as 2001:db8::/48 from a proxy that masks
// addresses. So Key(Key(x)) is Key(x).
func Key(text string, ipv4Bits, ipv6Bits int) (string, error) {
	if strings.Contains(text, "/") {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			return "", ErrNoAddress
		}
		return keyOfPrefix(FoldPrefix(prefix), ipv4Bits, ipv6Bits)
	}
	address, valid := Parse(text)
	if !valid {
		return "", ErrNoAddress
	}
	return Network(address, ipv4Bits, ipv6Bits), nil
}

func keyOfPrefix(prefix netip.Prefix, ipv4Bits, ipv6Bits int) (string, error) {
	bits, of := prefix.Bits(), prefix.Addr()
	switch {
	case bits == 0, bits == of.BitLen() && of.IsUnspecified():
		return "", ErrNoAddress
	case of.Is4():
		return Network(of, min(ipv4Bits, bits), ipv6Bits), nil
	case bits < mapped: // a network of NAT64, if it is one, has many clients
		return netip.PrefixFrom(of, min(ipv6Bits, bits)).Masked().String(), nil
	}
	return Network(of, min(ipv4Bits, bits-mapped), ipv6Bits), nil
}

// Parse returns the folded address in text: 192.0.2.1, 192.0.2.1:80, 2001:db8::1, [2001:db8::1] or [2001:db8::1]:80. It
// returns false for 0.0.0.0 and ::, which some proxies write for an unknown peer.
func Parse(text string) (address netip.Addr, valid bool) {
	address, valid = parse(text)
	address = Fold(address)
	return address, valid && !address.IsUnspecified()
}

func parse(text string) (netip.Addr, bool) {
	if inner, bracketed := strings.CutPrefix(text, "["); bracketed {
		host, port, closed := strings.Cut(inner, "]")
		parsed, err := netip.ParseAddr(host)
		return parsed, closed && err == nil && parsed.Is6() && (port == "" || isPort(port))
	}
	if parsed, err := netip.ParseAddr(text); err == nil {
		return parsed, true
	}
	i := max(0, strings.LastIndexByte(text, ':'))
	parsed, err := netip.ParseAddr(text[:i])
	return parsed, err == nil && parsed.Is4() && isPort(text[i:])
}

// isPort reports whether s is a colon and a port of up to five digits.
func isPort(s string) bool {
	port, ok := strings.CutPrefix(s, ":")
	return ok && port != "" && len(port) <= len("65535") && strings.Trim(port, "0123456789") == ""
}

// Fold returns address without a zone, and as IPv4 when it is an IPv4 address mapped into IPv6.
func Fold(address netip.Addr) netip.Addr { return address.WithZone("").Unmap() }

// mapped is the number of bits in front of an IPv4 address in an IPv6 address.
const mapped = 96

// FoldPrefix returns prefix as one of IPv4 if all of its addresses are IPv4 addresses mapped into IPv6.
func FoldPrefix(prefix netip.Prefix) netip.Prefix {
	if address := prefix.Addr(); address.Is4In6() && prefix.Bits() >= mapped {
		return netip.PrefixFrom(address.Unmap(), prefix.Bits()-mapped)
	}
	return prefix
}

// Network returns the key of a valid address. An IPv4 client behind a NAT64 of the well-known prefix (RFC 6052) is its
// IPv4 address; Fold does not translate it, because Fold decides which addresses are trusted.
func Network(address netip.Addr, ipv4Bits, ipv6Bits int) string {
	address = behindNAT64(Fold(address))
	bits := ipv6Bits
	if address.Is4() {
		bits = ipv4Bits
	}
	if bits == address.BitLen() {
		return address.String()
	}
	return netip.PrefixFrom(address, bits).Masked().String()
}

// behindNAT64 returns the IPv4 address in an address of 64:ff9b::/96, and any other address unchanged.
func behindNAT64(address netip.Addr) netip.Addr {
	const prefix = "\x00\x64\xff\x9b\x00\x00\x00\x00\x00\x00\x00\x00"
	if b := address.As16(); string(b[:len(prefix)]) == prefix {
		return netip.AddrFrom4([4]byte(b[len(prefix):]))
	}
	return address
}
