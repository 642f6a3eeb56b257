package rules_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/internal/testsize"
	"github.com/pgratelimit/pgratelimit/ratelimit"
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

		first, err := f.store.Put(t.Context(), why, perMinute("messages", "", 20), perMinute("messages", "pro", 50))
		require.NoError(t, err)
		applied, err := f.store.Override(t.Context(), why,
			rules.Override{Limit: "messages", Key: "ana", Multiplier: 3}, rules.Override{Limit: "messages", Key: "eve", OnPlan: "pro"})
		require.NoError(t, err)
		f.load(t)
		require.Equal(t, int64(2), f.set.Version())
		require.Equal(t, 10.0, f.capacity(t, first.From.Add(-time.Microsecond), bob.Plan("pro")))
		after := applied.From.Add(time.Second)
		require.Equal(t, 60.0, f.capacity(t, after, ana))
		require.Equal(t, 50.0, f.capacity(t, after, messages.For("eve")))
		require.Equal(t, 50.0, f.capacity(t, after, messages.For("eve").Plan("free")))
		require.Equal(t, 150.0, f.capacity(t, after, ana.Plan("pro")))
		require.Equal(t, 20.0, f.capacity(t, after, bob))
		require.Equal(t, 50.0, f.capacity(t, after, bob.Plan("pro")))
		require.Equal(t, 20.0, f.capacity(t, after, bob.Plan("unknown")))

		_, err = f.store.Override(t.Context(), from(after.Add(time.Hour)), rules.Override{Limit: "messages", Key: "ana", Multiplier: 4})
		require.NoError(t, err)
		f.load(t)
		require.Equal(t, 80.0, f.capacity(t, after.Add(time.Hour), ana))
		removed, err := f.store.RemoveOverride(t.Context(), why, "messages", "ana")
		require.NoError(t, err)
		f.load(t)
		require.Equal(t, 60.0, f.capacity(t, removed.From.Add(-time.Microsecond), ana))
		require.Equal(t, 20.0, f.capacity(t, removed.From, ana))
		require.Equal(t, 20.0, f.capacity(t, after.Add(time.Hour), ana), "also the override that lay ahead")
	})

	t.Run("AnOverrideMayBeOfTheBucketEverybodyShares", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		applied, err := f.store.Override(t.Context(), why, rules.Override{Limit: "messages", Multiplier: 3})
		require.NoError(t, err)
		f.load(t)
		require.Equal(t, 30.0, f.capacity(t, applied.From, messages.Global()))
		require.Equal(t, 10.0, f.capacity(t, applied.From, messages.For("ana")))
	})

	t.Run("DefinitionsOfOneNameAreKeptApart", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		applied, err := f.store.Override(t.Context(), why, rules.Override{Limit: "messages", Key: "ana", Multiplier: 3})
		require.NoError(t, err)
		_, err = f.store.Put(t.Context(), why, perMinute("messages", "pro", 50))
		require.NoError(t, err)
		f.load(t)
		for range 2 { // made, and remembered
			for n := range 40 { // more than are remembered
				code := ratelimit.Define("messages", ratelimit.PerMinute(float64(n+1)))
				require.Equal(t, 3*float64(n+1), f.capacity(t, applied.From, code.For("ana")))
				require.Equal(t, float64(n+1), f.capacity(t, applied.From.Add(-time.Hour), code.For("bob").Plan("pro")))
				require.Equal(t, float64(n+1), f.capacity(t, applied.From, code.For("bob")))
			}
		}
	})

	t.Run("TellsTheRuleThatHasDecided", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		rule := perMinute("messages", "", 20)
		rule.Unit = "tokens"
		applied, err := f.store.Put(t.Context(), why, rule)
		require.NoError(t, err)
		overridden, err := f.store.Override(t.Context(), rules.Edit{Author: "ada", Reason: "a trial", From: applied.From.Add(time.Hour)},
			rules.Override{Limit: "messages", Key: "ana", Multiplier: 3, Until: applied.From.Add(2 * time.Hour)})
		require.NoError(t, err)
		f.load(t)
		for _, told := range []struct {
			at         time.Time
			rule, unit string
		}{
			{applied.From.Add(-time.Second), "", ""},
			{applied.From, "messages", "tokens"},
			{overridden.From, "messages, override", "tokens"},
			{applied.From.Add(2 * time.Hour), "messages", "tokens"},
		} {
			d, err := f.at(t, told.at).Take(t.Context(), messages.For("ana").Cost(0.5))
			require.NoError(t, err)
			require.Equal(t, told.rule, d.States[0].Rule)
			require.Equal(t, told.unit, d.States[0].Unit)
		}
	})

	t.Run("MayBeAskedWhileItLoads", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		var group errgroup.Group
		var done atomic.Bool
		for worker := range 4 {
			group.Go(func() error {
				for n := 0; !done.Load(); n++ {
					key := fmt.Sprint((n + worker) % 64)
					rule := f.set.RulingFor(messages, []string{"", "pro"}[n%2], key)
					if rule != nil && rule.Name() == "" {
						return fmt.Errorf("the rule of %s has no name", key)
					}
					f.set.RulingsOf("messages")
				}
				return nil
			})
		}
		for n := range testsize.Of(5, 20) {
			_, err := f.store.Apply(t.Context(), why, rules.Changes{
				Put:      []rules.Rule{perMinute("messages", "", 20), perMinute("messages", "pro", 50)},
				Override: []rules.Override{{Limit: "messages", Key: fmt.Sprint(n), Multiplier: 3}},
			})
			require.NoError(t, err)
			f.load(t)
		}
		done.Store(true)
		require.NoError(t, group.Wait())
	})
}
