package rpclimit

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/pgratelimit/pgratelimit/internal/address"
)

// AddressKey returns the IP address in remote, which has the form host:port, as a key. An IPv4 address, also one mapped into IPv6,
// is the key itself; of an IPv6 address the key is the /64, the network of one host. Zones are dropped.
func AddressKey(remote string) (string, error) {
	pair, err := netip.ParseAddrPort(remote)
	if err != nil {
		return "", errors.New("the peer has no IP address")
	}
	return address.Network(pair.Addr(), address.IPv4Bits, address.IPv6Bits), nil
}

// OnlyValue returns the only value of a header. Without a value there is no key, and of several the client would choose one, so
// both are errors.
func OnlyValue(name string, values []string) (string, error) {
	if len(values) != 1 || values[0] == "" {
		return "", fmt.Errorf("%s: this call needs it once and not empty, and has it %d times", name, len(values))
	}
	return values[0], nil
}
