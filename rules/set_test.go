package rules_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/rules"
)

func TestSet(t *testing.T) {
	t.Parallel()

	t.Run("TheMostSpecificPolicyDecides", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		ana, bob := messages.For("ana"), messages.For("bob")
		now := time.Now()
		require.Equal(t, 10.0, f.capacity(t, now, ana), "nothing is loaded")
		f.load(t)
		require.Equal(t, 10.0, f.capacity(t, now, ana), "nothing is stored")

		applied, err := f.store.Put(t.Context(), why, perMinute("messages", "", 20), perMinute("messages", "pro", 50))
		require.NoError(t, err)
		_, err = f.store.Override(t.Context(), why, rules.Override{Limit: "messages", Key: "ana", Multiplier: 3})
		require.NoError(t, err)
		f.load(t)
		require.Equal(t, int64(2), f.set.Version())
		after := applied.From.Add(time.Second)
		require.Equal(t, 60.0, f.capacity(t, after, ana))
		require.Equal(t, 150.0, f.capacity(t, after, ana.Plan("pro")))
		require.Equal(t, 20.0, f.capacity(t, after, bob))
		require.Equal(t, 50.0, f.capacity(t, after, bob.Plan("pro")))
		require.Equal(t, 20.0, f.capacity(t, after, bob.Plan("unknown")))
		require.Equal(t, 10.0, f.capacity(t, applied.From.Add(-time.Microsecond), bob.Plan("pro")))
	})
}
