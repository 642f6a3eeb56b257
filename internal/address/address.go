// Package address says which IP addresses are one client to a limit.
package address

import "net/netip"

// The default number of significant bits of an address. An IPv6 network has at least a /64, and its hosts may use any address in
// it.
const (
	IPv4Bits = 32
	IPv6Bits = 64
)

// Fold returns address without a zone, and as IPv4 when it is an IPv4 address mapped into IPv6.
func Fold(address netip.Addr) netip.Addr { return address.WithZone("").Unmap() }

// Network returns the text of the network part of a valid, folded address: "203.0.113.7", "2001:db8:0:7::/64". An IPv4 client
// behind a NAT64 of the well-known prefix (RFC 6052) is its IPv4 address; Fold does not translate it, because Fold decides which
// addresses are trusted.
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
