package integration_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
)

// A tool reads keys in tables, and names their buckets without the secret under which they are stored.
func TestAStoredKeyNeedsNoSecret(t *testing.T) {
	t.Parallel()
	for name, config := range secrets {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			program, tool := b.with(t, config), b.with(t, ratelimit.Config{})
			d, err := program.Take(t.Context(), roomy.For("ada").Cost(2))
			require.NoError(t, err)
			require.True(t, d.Allowed)
			stored, err := program.StoredKey(roomy.For("ada"))
			require.NoError(t, err)

			ada := roomy.ForStored(stored)
			for by, limiter := range map[string]*ratelimit.Limiter{"program": program, "tool": tool} {
				same, err := limiter.StoredKey(ada)
				require.NoError(t, err)
				require.Equal(t, stored, same, by)
				value, err := limiter.Value(t.Context(), ada)
				require.NoError(t, err)
				require.InDelta(t, roomy.Capacity()-2, value.Tokens, 1, by)
			}
			r, err := tool.Reserve(t.Context(), ada)
			require.NoError(t, err)
			require.NoError(t, tool.Settle(t.Context(), r.ID, ada.Cost(3)))
			for call, run := range everyCall() {
				if asks(call) && call != "Settle" && call != "TakeSeveral" { // TakeSeveral has a request for another key, too
					require.NoError(t, run(t.Context(), tool, "", ada), call)
				}
			}
			require.NoError(t, tool.Reset(t.Context(), ada))
			require.Equal(t, roomy.Capacity(), b.held(t, roomy.Name(), stored))
			if config.HashKey != nil {
				_, err = tool.Take(t.Context(), ada, roomy.For("grace"))
				require.ErrorIs(t, err, ratelimit.ErrHashKeyMismatch, "one key that has to be hashed")
			}
			_, err = program.Take(t.Context(), roomy.For("grace"))
			require.NoError(t, err, "the tool has left no fingerprint of its own")
		})
	}
}

func TestTheStoredKeyOfGlobalIsEmpty(t *testing.T) {
	t.Parallel()
	b := setup(t)
	_, err := b.with(t, secrets["One"]).Take(t.Context(), roomy.Global().Cost(2))
	require.NoError(t, err)
	_, err = b.limiter.Take(t.Context(), roomy.Global())
	require.ErrorIs(t, err, ratelimit.ErrHashKeyMismatch, "a program has to have the secret whatever it asks for")
	require.NoError(t, b.limiter.Reset(t.Context(), roomy.ForStored("")))
	require.Equal(t, roomy.Capacity(), b.held(t, roomy.Name(), ""))
}

func TestAKeyThatCannotBeStoredIsRefused(t *testing.T) {
	t.Parallel()
	onEach(t, testAKeyThatCannotBeStoredIsRefused, onPostgres, inMemory)
}

func testAKeyThatCannotBeStoredIsRefused(t *testing.T, on backend) {
	b := on.setup(t)
	tx := b.begin(t, "read committed")
	for _, key := range []string{strings.Repeat("k", 257), "a\x00b", "\xff"} {
		for _, limiter := range []*ratelimit.Limiter{b.limiter, b.with(t, secrets["One"]), b.limiter.WithTx(tx)} {
			_, err := limiter.Take(t.Context(), roomy.ForStored(key))
			requireOnePrefix(t, err, ratelimit.ErrInvalidKey, "take")
		}
	}
	_, err := b.limiter.WithTx(tx).Take(t.Context(), roomy.ForStored(strings.Repeat("k", 256)))
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
}
