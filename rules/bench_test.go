package rules_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/rules"
)

// TestRulingForAllocatesNothing holds for each decision but the first of a limit, a plan or a key.
func TestRulingForAllocatesNothing(t *testing.T) { //nolint:paralleltest // testing.AllocsPerRun counts those of all goroutines
	f := setup(t)
	_, err := f.store.Put(t.Context(), why, perMinute("messages", "", 20), perMinute("messages", "pro", 50))
	require.NoError(t, err)
	_, err = f.store.Override(t.Context(), why, rules.Override{Limit: "messages", Key: "ana", Multiplier: 3})
	require.NoError(t, err)
	f.load(t)
	for _, key := range []string{"ana", "bob"} {
		for _, plan := range []string{"", "pro", "unknown"} {
			require.Zero(t, testing.AllocsPerRun(100, func() { f.set.RulingFor(messages, plan, key) }))
		}
	}
}
