package address_test

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/address"
)

func TestNetwork(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]struct{ standard, coarse string }{
		"192.0.2.7":                 {"192.0.2.7", "192.0.2.0/24"},
		"::ffff:192.0.2.7":          {"192.0.2.7", "192.0.2.0/24"},
		"::ffff:192.0.2.7%eth0":     {"192.0.2.7", "192.0.2.0/24"},
		"2001:db8:1:2:3:4:5:6":      {"2001:db8:1:2::/64", "2001:db8:1::/48"},
		"2001:db8:1:2:ffff::1%eth0": {"2001:db8:1:2::/64", "2001:db8:1::/48"},
		"fe80::1%eth0":              {"fe80::/64", "fe80::/48"},
		"64:ff9b::192.0.2.7":        {"192.0.2.7", "192.0.2.0/24"},
		"64:ff9b::192.0.2.7%eth0":   {"192.0.2.7", "192.0.2.0/24"},
		"64:ff9b:1::192.0.2.7":      {"64:ff9b:1::/64", "64:ff9b:1::/48"},
		"64:ff9b::1:192.0.2.7":      {"64:ff9b::/64", "64:ff9b::/48"},
		"::1":                       {"::/64", "::/48"},
	} {
		a := netip.MustParseAddr(text)
		require.Equal(t, want.standard, address.Network(a, address.IPv4Bits, address.IPv6Bits), text)
		require.Equal(t, want.coarse, address.Network(a, 24, 48), text)
	}
}

// A key of a key is the same key, so that tiers can cut what a proxy or a program has cut.
func TestKey(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"192.0.2.7": "192.0.2.7", "192.0.2.7:80": "192.0.2.7", "192.0.2.7/32": "192.0.2.7", "192.0.2.0/24": "192.0.2.0/24",
		"::ffff:192.0.2.7": "192.0.2.7", "::ffff:192.0.2.7/128": "192.0.2.7", "::ffff:192.0.2.7/120": "192.0.2.0/24",
		"[2001:db8::1%eth0]:80": "2001:db8::/64", "2001:db8::1/128": "2001:db8::/64", "2001:db8::1/48": "2001:db8::/48",
		"[2001:db8::1]": "2001:db8::/64", "64:ff9b::192.0.2.7": "192.0.2.7", "64:ff9b::192.0.2.7/128": "192.0.2.7", "64:ff9b::/64": "64:ff9b::/64",
	} {
		for range 2 {
			got, err := address.Key(text, address.IPv4Bits, address.IPv6Bits)
			require.NoError(t, err, text)
			require.Equal(t, want, got, text)
			text = got
		}
	}
	for _, text := range []string{
		"", "-", "@", "unknown", "localhost", "192.0.2.7, 10.0.0.1", "192.0.2.7:", "192.0.2.7:http", "192.0.2.7:123456", "0.0.0.0", "::", "[::]:80",
		"[192.0.2.7]:80", "2001:db8::1]:80", "192.0.2.7/33", "192.0.2.07", "0.0.0.0/0", "::/128",
	} {
		got, err := address.Key(text, address.IPv4Bits, address.IPv6Bits)
		require.ErrorIs(t, err, address.ErrNoAddress, text)
		require.Empty(t, got)
	}
}

func TestFold(t *testing.T) {
	t.Parallel()
	require.Equal(t, netip.MustParseAddr("192.0.2.7"), address.Fold(netip.MustParseAddr("::ffff:192.0.2.7%eth0")))
	require.Equal(t, netip.MustParseAddr("fe80::1"), address.Fold(netip.MustParseAddr("fe80::1%eth0")))
	require.False(t, address.Fold(netip.Addr{}).IsValid())
	nat64 := netip.MustParseAddr("64:ff9b::10.0.0.1")
	require.Equal(t, nat64, address.Fold(nat64), "who writes the address of a proxy into it is no proxy")
}
