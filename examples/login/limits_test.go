package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAccountOf(t *testing.T) {
	t.Parallel()

	for _, tt := range []struct{ name, typed, account string }{
		{"KeepsTheUsualForm", "ada@example.com", "ada@example.com"},
		{"FoldsCaseAndSpace", " Ada@Example.COM\t", "ada@example.com"},
		{"ComposesAccents", "zoe\u0308", "zoë"},
		{"FoldsCaseOfAccents", "ZOË", "zoë"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			account, err := accountOf(tt.typed)
			require.NoError(t, err)
			require.Equal(t, tt.account, account)
		})
	}

	for _, tt := range []struct{ name, typed, problem string }{
		{"RefusesNothing", "", "the login is empty"},
		{"RefusesSpace", " \t ", "the login is empty"},
		{"RefusesTooMuch", strings.Repeat("a", 255), "more than 254 bytes"},
		{"RefusesANUL", "ada\x00", "not text"},
		{"RefusesALineBreak", "ada\nalan", "not text"},
		{"RefusesInvalidUTF8", "ada\xff", "not text"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			_, err := accountOf(tt.typed)
			require.ErrorContains(t, err, tt.problem)
		})
	}
}

func TestClientOf(t *testing.T) {
	t.Parallel()

	for _, tt := range []struct{ name, remoteAddr, client string }{
		{"IsAnIPv4Address", "192.0.2.1:50000", "192.0.2.1"},
		{"IsTheSameFromAnotherPort", "192.0.2.1:50001", "192.0.2.1"},
		{"IsAnIPv6Network", "[2001:db8:1:2:3:4:5:6]:50000", "2001:db8:1:2::/64"},
		{"FoldsIPv4InIPv6", "[::ffff:192.0.2.1]:50000", "192.0.2.1"},
		{"DropsTheZone", "[fe80::1%eth0]:50000", "fe80::/64"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			client, err := clientOf(tt.remoteAddr)
			require.NoError(t, err)
			require.Equal(t, tt.client, client)
		})
	}

	for _, tt := range []struct{ name, remoteAddr string }{
		{"RefusesNothing", ""},
		{"RefusesAUnixSocket", "@"},
		{"RefusesAName", "localhost:80"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			_, err := clientOf(tt.remoteAddr)
			require.Error(t, err)
		})
	}
}
