package processes_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/integration_test/internal/world"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// ruleUsers starts two programs on a database, and returns them when they know a version of the rules.
func ruleUsers(t *testing.T, w *world.World, version int64) (users [2]*ruleUser) {
	t.Helper()
	for i := range users {
		users[i] = startRuleUser(t, w.URL(), rules.Config{})
		users[i].knows(t, version)
	}
	return users
}

// valueFrom waits until a program sees what a bucket holds at an instant of the database's clock or later, and returns that.
func (u *ruleUser) valueFrom(t *testing.T, at time.Time) (tokens float64) {
	t.Helper()
	world.Eventually(t, "the instant has come", func() bool {
		value, err := u.limiter.Value(t.Context(), ruledCode.For("ada"))
		require.NoError(t, err)
		tokens = value.Tokens
		return !value.AsOf.Before(at)
	})
	return tokens
}

// A key that owes tokens still owes them when it gets a policy of its own, and when that ends: the same number, or the same share
// of its capacity.
func TestAnOverrideOfAKeyThatOwes(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		change       ratelimit.OnChange
		begun, ended float64
	}{
		{change: ratelimit.KeepTokens, begun: -50, ended: -60},
		{change: ratelimit.ScaleTokens, begun: -100, ended: -55},
		{change: ratelimit.AddTokens, begun: 50, ended: -60},
		{change: ratelimit.ResetTokens, begun: 200, ended: 100},
	} {
		t.Run(string(test.change), func(t *testing.T) {
			t.Parallel()
			w := world.New(t)
			first, err := newStore(t, w, -1).Put(t.Context(), edit, rules.Rule{Limit: "api", Policy: ratelimit.TokenBucket{Rate: 100, Period: world.Century}})
			require.NoError(t, err)
			users, store := ruleUsers(t, w, first.Version), newStore(t, w, 50*time.Millisecond)
			users[0].take(t, "ada", 100)
			_, err = users[1].limiter.Reserve(t.Context(), ruledCode.For("ada").Cost(50))
			require.NoError(t, err)

			begun, err := store.Override(t.Context(), edit, rules.Override{
				Limit: "api", Key: "ada", OnChange: test.change, Policy: ratelimit.TokenBucket{Rate: 200, Period: world.Century},
			})
			require.NoError(t, err)
			for _, u := range users {
				u.knows(t, begun.Version)
				require.InDelta(t, test.begun, u.valueFrom(t, begun.From), 1e-3)
			}
			r, err := users[0].limiter.Reserve(t.Context(), ruledCode.For("ada").Cost(10))
			require.NoError(t, err)
			require.InDelta(t, test.begun-10, r.States[0].Value.Tokens, 1e-3)
			require.InDelta(t, test.begun-10, rowOf(t, w, "ada").Value, 1e-3)

			ended, err := store.RemoveOverride(t.Context(), edit, "api", "ada")
			require.NoError(t, err)
			for _, u := range users {
				u.knows(t, ended.Version)
				require.InDelta(t, test.ended, u.valueFrom(t, ended.From), 1e-3)
			}
			require.InDelta(t, test.begun-10, rowOf(t, w, "ada").Value, 1e-3, "a look writes nothing")
		})
	}
}
