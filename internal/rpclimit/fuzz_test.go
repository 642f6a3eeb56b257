package rpclimit_test

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/rpclimit"
)

// FuzzAddressKey checks that a peer has a key or an error, and that the key is the network of its address.
func FuzzAddressKey(f *testing.F) {
	for _, remote := range []string{"", "192.0.2.7:4711", "[::ffff:192.0.2.7%eth0]:4711", "[2001:db8:1:2:3:4:5:6]:80", "[fe80::1%lo]:80", "@", "192.0.2.7:", "[::1]:99999"} {
		f.Add(remote)
	}
	f.Fuzz(func(t *testing.T, remote string) {
		key, err := rpclimit.AddressKey(remote)
		if err != nil {
			require.Empty(t, key)
			return
		}
		peer, err := netip.ParseAddrPort(remote)
		require.NoError(t, err)
		address := peer.Addr().Unmap().WithZone("")
		if address.Is4() {
			require.Equal(t, address.String(), key)
			return
		}
		network, err := netip.ParsePrefix(key)
		require.NoError(t, err)
		require.Equal(t, 64, network.Bits())
		require.True(t, network.Contains(address), "%v in %v", address, network)
	})
}
