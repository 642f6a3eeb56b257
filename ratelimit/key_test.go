package ratelimit_test

import (
	"math"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// at is the instant of tests in which nothing takes time.
var at = time.Date(2026, time.March, 2, 0, 0, 0, 0, time.UTC)

// newLimiter returns a limiter whose clock stands still.
func newLimiter(t *testing.T, pool ratelimit.Pool, config ratelimit.Config) *ratelimit.Limiter {
	t.Helper()
	config.AsOf = func() time.Time { return at }
	limiter, err := ratelimit.New(pool, config)
	require.NoError(t, err)
	return limiter
}

// held returns what the bucket of request holds.
func held(t *testing.T, limiter *ratelimit.Limiter, request ratelimit.Request) float64 {
	t.Helper()
	value, err := limiter.Value(t.Context(), request)
	require.NoError(t, err)
	return value.Tokens
}

// storedKeys returns the keys of all rows, in order.
func storedKeys(t *testing.T, pool *pgxpool.Pool) []string {
	t.Helper()
	rows, err := pool.Query(t.Context(), "SELECT key FROM ratelimit.buckets ORDER BY key")
	require.NoError(t, err)
	keys, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return keys
}

// TestKeysAreComparedByteForByte gives every key a bucket of its own, however alike two keys look.
func TestKeysAreComparedByteForByte(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("k", 299)
	for name, c := range map[string]struct {
		config ratelimit.Config
		keys   []string
	}{
		"Plain": {ratelimit.Config{}, []string{
			"a", "A", " a ", " a", "a ", "a\t", "a\n", "\u00e1", "a\u0301", "\u0430", "", "'", `"`, "%", "\\", "\ufeffa",
			strings.Repeat("k", 255), strings.Repeat("k", 256), strings.Repeat("k", 255) + "l", strings.Repeat("é", 128),
		}},
		"Hashed": {ratelimit.Config{HashKey: []byte("0123456789abcdef")}, []string{
			"a", "A", " a ", "a\x00", "\x00a", "\xff", "\xfe", "", long + "a", long + "b", long, strings.Repeat("k", 1<<16),
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := postgrestest.New(t)
			limiter := newLimiter(t, pool, c.config)
			limit := ratelimit.Define("perKey", ratelimit.PerDay(100))
			request := func(key string) ratelimit.Request {
				if key == "" {
					return limit.Global()
				}
				return limit.For(key)
			}
			for i, key := range c.keys {
				d, err := limiter.Take(t.Context(), request(key).Cost(float64(i+1)))
				require.NoError(t, err, "%.20q", key)
				require.True(t, d.Allowed, "%.20q", key)
				require.Equal(t, float64(100-i-1), d.Remaining, "%.20q", key)
			}
			for i, key := range c.keys {
				require.Equal(t, float64(100-i-1), held(t, limiter, request(key)), "%.20q", key)
			}
			require.Len(t, storedKeys(t, pool), len(c.keys))
		})
	}
}

// TestHashedKeysAreNotStored promises that a reader of the table learns no key, not even by trying keys out: the hash
// needs the secret.
func TestHashedKeysAreNotStored(t *testing.T) {
	t.Parallel()
	hashes := make(map[string]bool)
	for _, hashKey := range []string{"0123456789abcdef", "0123456789abcdeF"} {
		pool, own := postgrestest.New(t), []byte(hashKey) // a second secret is refused on the same tables
		limiter := newLimiter(t, pool, ratelimit.Config{HashKey: own})
		clear(own) // the limiter has its own
		for _, name := range []string{"sendMessage", "freeTrials"} {
			require.NoError(t, limiter.Require(t.Context(), ratelimit.Define(name, ratelimit.PerDay(10)).For(secret)))
		}
		for _, key := range storedKeys(t, pool) {
			require.NotContains(t, key, secret)
			hashes[key] = true
		}
	}
	require.Len(t, hashes, 4, "another limit and another secret have another hash")
	require.Contains(t, hashes, "yvUeiEblJUy5OBge9qLkjvvqZN-B6o_dgsXpwGfPoGo", "a release that changes it is a reset of every limit")
}

func TestACallTakesUpTo64Limits(t *testing.T) {
	t.Parallel()
	pool := postgrestest.New(t)
	var requests []ratelimit.Request
	for i := range 64 {
		requests = append(requests, ratelimit.Define("perKey", ratelimit.PerDay(10)).For(strings.Repeat("k", 64-i)))
	}
	require.NoError(t, newLimiter(t, pool, ratelimit.Config{}).Require(t.Context(), requests...))
	require.Len(t, storedKeys(t, pool), 64)
}

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
	require.Empty(t, ratelimit.Join())
}

// FuzzJoin splits joined keys by the documented rule, which shows that different parts give different keys.
func FuzzJoin(f *testing.F) {
	f.Add("a|b", "c", `\`)
	f.Add("a", `b|\`, "||")
	f.Add("a", "", "b")
	f.Add("", "a", "")
	f.Fuzz(func(t *testing.T, a, b, c string) {
		for _, parts := range [][]string{{a}, {a, b}, {a, b, c}} {
			if slices.Contains(parts, "") {
				require.Empty(t, ratelimit.Join(parts...))
				continue
			}
			require.Equal(t, parts, takeApart(ratelimit.Join(parts...)))
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

// FuzzKey checks that the table can store every accepted key.
func FuzzKey(f *testing.F) {
	for _, key := range []string{"", "a", " a ", "A", "\x00", "a\x00b", "\xff", "é", strings.Repeat("x", 256), strings.Repeat("x", 257), strings.Repeat("é", 128)} {
		f.Add(key)
	}
	request := ratelimit.Define("fuzz", ratelimit.PerSecond(1)).For
	plain, err := ratelimit.New(untouched{}, ratelimit.Config{})
	require.NoError(f, err)
	hashing, err := ratelimit.New(untouched{}, ratelimit.Config{HashKey: []byte("0123456789abcdef")})
	require.NoError(f, err)
	f.Fuzz(func(t *testing.T, key string) {
		stored, err := plain.StoredKey(request(key))
		if err != nil {
			require.ErrorIs(t, err, ratelimit.ErrInvalidKey)
			require.Empty(t, stored)
		} else {
			require.Equal(t, key, stored)
			require.True(t, len(key) >= 1 && len(key) <= 256 && utf8.ValidString(key) && !strings.Contains(key, "\x00"))
		}
		hashed, err := hashing.StoredKey(request(key))
		if err != nil {
			require.ErrorIs(t, err, ratelimit.ErrInvalidKey)
			require.True(t, key == "" || len(key) > 1<<16)
			return
		}
		require.Regexp(t, `^[A-Za-z0-9_-]{43}$`, hashed)
		require.NotEqual(t, key, hashed)
	})
}
