package rpclimit_test

import (
	"math"
	"net/netip"
	"strconv"
	"testing"
	"time"

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

// FuzzOnlyValue compares the value of a header with the value that was set.
func FuzzOnlyValue(f *testing.F) {
	f.Add("x-key", "a", "b", 1)
	f.Add("", "", "", 2)
	f.Fuzz(func(t *testing.T, name, first, second string, n int) {
		values := []string{first, second}[:min(max(n, 0), 2)]
		got, err := rpclimit.OnlyValue(name, values)
		if n == 1 && first != "" {
			require.NoError(t, err)
			require.Equal(t, first, got)
			return
		}
		require.Error(t, err)
		require.Empty(t, got)
	})
}

// longestWait is the longest wait that a decision tells.
const longestWait = 250 * 365 * 24 * time.Hour

// FuzzRetryAfter checks that the wait sent to clients is never too short, and is a whole number in their range.
func FuzzRetryAfter(f *testing.F) {
	for _, wait := range []time.Duration{0, 1, time.Millisecond, time.Second + 1, 40 * 24 * time.Hour, longestWait} {
		f.Add(int64(wait))
	}
	f.Fuzz(func(t *testing.T, wait int64) {
		if wait < 0 || wait > int64(longestWait) {
			return
		}
		r := rpclimit.RejectionError{RetryAfter: time.Duration(wait)}
		ms, err := strconv.ParseInt(r.PushbackMillis(), 10, 32)
		require.NoError(t, err)
		require.True(t, ms == math.MaxInt32 || ms >= wait/1e6, "%d ms for %v", ms, r.RetryAfter)
		require.LessOrEqual(t, ms, wait/1e6+1)
		seconds, err := strconv.ParseInt(r.RetryAfterSeconds(), 10, 64)
		require.NoError(t, err)
		require.True(t, seconds >= wait/1e9 && seconds <= wait/1e9+1 && (seconds > wait/1e9 || wait%1e9 == 0), "%d s for %v", seconds, r.RetryAfter)
	})
}
