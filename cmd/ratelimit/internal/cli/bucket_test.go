package cli_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// bucket is a part of what get, take, reset and credit print.
type bucket struct {
	Key               string
	Tokens, Remaining float64
}

func TestAHostileKeyBreaksNothing(t *testing.T) {
	t.Parallel()
	f := setup(t)
	f.put(t, weekly("sends", "", 5))
	key := "\x1b[2J\u202enc\r\nada\tx"
	f.ok(t, "take", "sends", key)
	out := f.ok(t, "get", "sends", key)
	require.Contains(t, out, `"\x1b[2J\u202enc\r\nada\tx"`)
	require.NotContains(t, out, "\x1b")
	require.Equal(t, key, read[bucket](t, f, 0, "get", "sends", key).Key)
}

func TestHashKey(t *testing.T) {
	t.Parallel()
	f := setup(t)
	ctx := t.Context()
	secret := "0123456789abcdef"
	f.put(t, weekly("sends", "", 5))
	path := file(t, "secret", secret+"\n")
	f.ok(t, "get", "sends", "ada")
	f.ok(t, "take", "sends", "eve")
	var fingerprints int
	require.NoError(t, f.pool.QueryRow(ctx, "SELECT count(*) FROM ratelimit.fingerprint").Scan(&fingerprints))
	require.Zero(t, fingerprints, "this program is not the first to say what the secret is")

	set, err := rules.NewSet(f.pool, rules.Config{})
	require.NoError(t, err)
	require.NoError(t, set.Load(ctx))
	limiter := f.limiter(t, ratelimit.Config{HashKey: []byte(secret), Policies: set})
	request := ratelimit.Define("sends", ratelimit.PerWeek(1)).For("ada").Cost(2)
	_, err = limiter.Take(ctx, request)
	require.NoError(t, err)
	stored, err := limiter.StoredKey(request)
	require.NoError(t, err)

	for _, args := range [][]string{{"get", "sends", "ada"}, {"take", "sends", "ada"}, {"pause", "sends", "ada", "--for", "1h", "--reason", "x"}} {
		require.Contains(t, f.fails(t, 1, args...), "--hash-key-file or RATELIMIT_HASH_KEY, and --stored", "%v", args)
	}
	require.Equal(t, 2.0, read[bucket](t, f, 0, "take", "sends", "ada", "--hash-key-file", path).Remaining)
	require.Equal(t, 1.0, read[bucket](t, f, 0, "take", "sends", stored, "--stored").Remaining)
	f.env = append(f.env, "RATELIMIT_HASH_KEY="+secret)
	b := read[bucket](t, f, 0, "get", "sends", "ada")
	require.Equal(t, stored, b.Key, "a key is shown as it is stored")
	require.Equal(t, 1.0, b.Tokens)
	require.NotContains(t, f.ok(t, "get", "sends", "ada"), "ada")
	for _, verb := range []string{"check", "get", "credit", "reset"} {
		for _, key := range [][]string{{"ada", "--hash-key-file", path}, {stored, "--stored"}} {
			args := append([]string{verb, "sends"}, key...)
			if verb == "reset" {
				args = append(args, "--yes")
			}
			require.Equal(t, stored, read[bucket](t, f, 0, args...).Key, verb)
		}
	}
	f.ok(t, "pause", "sends", "ada", "--for", "1h", "--reason", "x", "--hash-key-file", path)
	f.ok(t, "resume", "sends", stored, "--stored", "--reason", "x")
	f.ok(t, "pause", "sends", stored, "--stored", "--for", "1h", "--reason", "x")
	f.ok(t, "resume", "sends", "ada", "--reason", "x", "--hash-key-file", path)
	require.Contains(t, f.fails(t, 2, "get", "sends", "--stored"), "without a KEY")
}
