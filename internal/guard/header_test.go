package guard_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/guard"
)

// TestHeaderKey promises that a client can't have further buckets by another spelling of what it sends.
func TestHeaderKey(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, value, want string }{
		{"X-Api-Key", "bearer x", "bearer x"},
		{"X-Api-Key", " \tk1  ", "k1"},
		{"X-Api-Key", " ", ""},
		{"x-key-bin", " \x00 ", " \x00 "},
		{"Authorization", "Bearer x", "Bearer x"},
		{"authorization", "bearer x", "Bearer x"},
		{"authorization", " BEARER  x ", "Bearer x"},
		{"authorization", "Bearer X", "Bearer X"},
		{"authorization", "token", "token"},
		{"authorization", " ", ""},
		{"authorization", "", ""},
	} {
		require.Equal(t, c.want, guard.HeaderKey(c.name, c.value), "%q: %q", c.name, c.value)
	}
}
