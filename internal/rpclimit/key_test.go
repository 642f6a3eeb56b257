package rpclimit_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/rpclimit"
)

func TestAddressKey(t *testing.T) {
	t.Parallel()
	for remote, want := range map[string]string{
		"192.0.2.7:4711":               "192.0.2.7",
		"[::ffff:192.0.2.7%eth0]:4711": "192.0.2.7",
		"[2001:db8:1:2:3:4:5:6]:4711":  "2001:db8:1:2::/64",
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
