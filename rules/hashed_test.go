package rules_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// If programs store keys as HMACs, no request has a plain key, so an override or a pause of one is a mistake.
func TestAPlainKeyIsRejectedWhereKeysAreHashed(t *testing.T) {
	t.Parallel()
	f := setup(t)
	until := time.Now().Add(time.Hour)
	change := func(key string) []error {
		return []error{
			errorOf(f.store.Override(t.Context(), why, rules.Override{Limit: "messages", Key: key, Multiplier: 2})),
			errorOf(f.store.Pause(t.Context(), why, rules.Pause{Limit: "messages", Key: key, Until: until})),
			errorOf(f.store.Pause(t.Context(), why, rules.Pause{Limit: "messages", Key: key, Until: until, NoSooner: true})),
		}
	}
	for _, err := range change("ada") {
		require.NoError(t, err, "no program has stored a key yet")
	}
	limiter, err := ratelimit.New(f.pool, ratelimit.Config{HashKey: []byte("a secret of thirty-two bytes, ok")})
	require.NoError(t, err)
	require.NoError(t, limiter.Require(t.Context(), messages.For("bob")))
	before := f.history(t, rules.HistoryQuery{})
	for _, key := range []string{"ada", "a key of just as many characters as a hash", "012345678901234567890123456789012345678901"} {
		for _, err := range change(key) {
			require.ErrorIs(t, err, rules.ErrInvalid)
			require.ErrorContains(t, err, "Limiter.StoredKey")
			require.ErrorContains(t, err, key)
		}
	}
	require.Equal(t, before, f.history(t, rules.HistoryQuery{}))
	stored, err := limiter.StoredKey(messages.For("ada"))
	require.NoError(t, err)
	for _, key := range []string{stored, ""} {
		for _, err := range change(key) {
			require.NoError(t, err)
		}
	}
	require.NoError(t, errorOf(f.store.RemoveOverride(t.Context(), why, "messages", "ada")), "an earlier mistake can be undone")
	require.NoError(t, errorOf(f.store.Resume(t.Context(), why, "messages", "ada")))
}
