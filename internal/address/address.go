// Package address says which IP addresses are one client to a limit.
package address

import "net/netip"

// Bits of an address that count where the application does not choose: of IPv6 what every network has at the
// least, and any of its hosts may wander in.
const (
	IPv4Bits = 32
	IPv6Bits = 64
)

// Fold returns address without a zone, and as IPv4 when it is an IPv4 address mapped into IPv6.
func Fold(address netip.Addr) netip.Addr { return address.WithZone("").Unmap() }

// Network returns the text of what counts of a valid address, which is folded before: "203.0.113.7",
// "2001:db8:0:7::/64".
func Network(address netip.Addr, ipv4Bits, ipv6Bits int) string {
	address = Fold(address)
	bits := ipv6Bits
	if address.Is4() {
		bits = ipv4Bits
	}
	if bits == address.BitLen() {
		return address.String()
	}
	return netip.PrefixFrom(address, bits).Masked().String()
}
