package rpclimit_test

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/rpclimit"
)

func TestAddressKey(t *testing.T) {
	t.Parallel()
	for remote, want := range map[string]string{
		"192.0.2.7:4711":               "192.0.2.7",
		"[::ffff:192.0.2.7]:4711":      "192.0.2.7",
		"[2001:db8:1:2:3:4:5:6]:4711":  "2001:db8:1:2::/64",
		"[2001:db8:1:2:ffff::1]:80":    "2001:db8:1:2::/64",
		"[2001:db8:1:3::1]:80":         "2001:db8:1:3::/64",
		"[fe80::1%eth0]:80":            "fe80::/64",
		"[fe80::2%lo]:80":              "fe80::/64",
		"[::1]:80":                     "::/64",
		"[::ffff:192.0.2.7%eth0]:4711": "192.0.2.7",
	} {
		got, err := rpclimit.AddressKey(remote)
		require.NoError(t, err, remote)
		require.Equal(t, want, got, remote)
	}
	for _, remote := range []string{"", "@", "/run/app.sock", "bufconn", "192.0.2.7", "example.com:80", "192.0.2.7:"} {
		got, err := rpclimit.AddressKey(remote)
		require.Error(t, err, remote)
		require.Empty(t, got, "never a bucket that all of them share")
	}
}

func TestOnlyValue(t *testing.T) {
	t.Parallel()
	got, err := rpclimit.OnlyValue("header X-Api-Key", []string{"a"})
	require.NoError(t, err)
	require.Equal(t, "a", got)
	for _, values := range [][]string{nil, {}, {""}, {"a", "b"}, {"a", "a"}, {"", "a"}} {
		got, err := rpclimit.OnlyValue("header X-Api-Key", values)
		require.ErrorContains(t, err, "header X-Api-Key")
		require.Empty(t, got)
	}
}

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
