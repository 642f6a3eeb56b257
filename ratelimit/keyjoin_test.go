package ratelimit_test

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// memberID and accountID are types as programs have for their IDs.
type (
	memberID  int64
	accountID [16]byte
)

func TestKeysOfIDs(t *testing.T) {
	t.Parallel()
	require.Equal(t, "42", ratelimit.ID(42))
	require.Equal(t, "42", ratelimit.ID(memberID(42)))
	require.Equal(t, "-9223372036854775808", ratelimit.ID(int64(math.MinInt64)))
	require.Equal(t, "18446744073709551615", ratelimit.ID(uint64(math.MaxUint64)))
	require.Equal(t, "-1", ratelimit.ID(int8(-1)))
	require.Empty(t, ratelimit.ID(0), "an ID that was not set")
	require.Equal(t, "00010203-0405-0607-0809-0a0b0c0dfeff", ratelimit.UUID(accountID{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 0xfe, 0xff}))
	require.Empty(t, ratelimit.UUID(accountID{}))
}

func TestJoin(t *testing.T) {
	t.Parallel()
	require.Equal(t, "acme|42", ratelimit.Join("acme", ratelimit.ID(42)))
	require.Equal(t, `a\|b|c`, ratelimit.Join("a|b", "c"))
	require.Equal(t, `a\\|b`, ratelimit.Join(`a\`, "b"))
	require.Equal(t, "alone", ratelimit.Join("alone"))
	for _, parts := range [][]string{nil, {""}, {"acme", ""}, {"", "acme"}, {"a", ratelimit.ID(0), "b"}} {
		require.Empty(t, ratelimit.Join(parts...), "%q", parts)
	}
}

// FuzzJoin splits joined keys by the documented rule, which shows that different parts give different keys.
func FuzzJoin(f *testing.F) {
	f.Add("a|b", "c", `\`)
	f.Add("a", `b|\`, "||")
	f.Fuzz(func(t *testing.T, a, b, c string) {
		for _, parts := range [][]string{{a}, {a, b}, {a, b, c}} {
			if !slices.Contains(parts, "") {
				require.Equal(t, parts, takeApart(ratelimit.Join(parts...)))
			}
		}
	})
}

// takeApart returns the parts of a key that was joined.
func takeApart(key string) (parts []string) {
	var part strings.Builder
	for i := 0; i < len(key); i++ {
		switch key[i] {
		case '|':
			parts = append(parts, part.String())
			part.Reset()
		case '\\':
			i++
			part.WriteByte(key[i])
		default:
			part.WriteByte(key[i])
		}
	}
	return append(parts, part.String())
}
