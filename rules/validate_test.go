package rules_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

func TestValidate(t *testing.T) {
	t.Parallel()
	known := []rules.Registered{{Limit: messages, MaxCost: 8}, {Limit: ratelimit.Define("tokens", ratelimit.PerMinute(100))}}
	spaced := perMinute("messages", "spaced", 5)
	spaced.Capacity = new(0.0)

	t.Run("AcceptsWhatGivesEachCost", func(t *testing.T) {
		t.Parallel()
		require.NoError(t, rules.Validate(nil))
		require.NoError(t, rules.Validate([]rules.Rule{perMinute("messages", "", 8), perMinute("tokens", "pro", 1), spaced}, known...))
	})

	t.Run("RefusesWhatDoesNot", func(t *testing.T) {
		t.Parallel()
		bounded := spaced
		bounded.MaxReserved = new(7.0)
		err := rules.Validate([]rules.Rule{
			perMinute("messages", "", 7), perMinute("mesages", "", 8), perMinute("tokens", "", -1), bounded, perMinute("messages", "pro", 9),
		}, known...)
		require.ErrorIs(t, err, rules.ErrInvalid)
		require.ErrorContains(t, err, `rule "messages", plan "": it never gives more than 7 at once and the program asks up to 8; raise its Capacity`)
		require.ErrorContains(t, err, `rule "mesages", plan "": the program does not know the limit`)
		require.ErrorContains(t, err, `rule "tokens", plan "": `)
		require.ErrorContains(t, err, "its Rate is -1")
		require.ErrorContains(t, err, `plan "spaced": it never gives more than 7`)
		require.NotContains(t, err.Error(), `"pro"`)
	})

	t.Run("RefusesSlotsForTokensAndTokensForSlots", func(t *testing.T) {
		t.Parallel()
		jobs := rules.Registered{Limit: ratelimit.Define("jobs", ratelimit.Concurrency{Most: 3}), MaxCost: 2}
		slots := rules.Rule{Kind: rules.Concurrency, Most: 5}
		good, few, wrong := slots, slots, slots
		good.Limit, few.Limit, few.Plan, few.Most, wrong.Limit = "jobs", "jobs", "free", 1, "messages"
		require.NoError(t, rules.Validate([]rules.Rule{good}, jobs))
		err := rules.Validate([]rules.Rule{few, wrong, perMinute("jobs", "", 8)}, append(known, jobs)...)
		require.ErrorContains(t, err, `plan "free": it never gives more than 1 at once and the program asks up to 2`)
		require.ErrorContains(t, err, `rule "messages", plan "": it is 5 at a time`)
		require.ErrorContains(t, err, `rule "jobs", plan "": it is 8`)
		require.ErrorContains(t, err, "the one is asked by Acquire, the other by Take")
	})

	t.Run("ChecksWhatIsLoaded", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		require.NoError(t, f.set.Validate(known...), "nothing is loaded")
		_, err := f.store.Apply(t.Context(), why, rules.Changes{
			Put:      []rules.Rule{perMinute("messages", "", 7), perMinute("tokens", "", 7)},
			Override: []rules.Override{{Limit: "messages", Key: "ana", Multiplier: 2}, {Limit: "tokens", Key: "ana", Multiplier: 2}},
			Tiers:    &rules.TierSet{Tiers: []rules.Tier{{Limit: "messages"}}},
		})
		require.NoError(t, err)
		f.load(t)
		err = f.set.Validate(known...)
		require.ErrorContains(t, err, `rule "messages", plan "": it never gives more than 7`)
		require.NotContains(t, err.Error(), "ana", "twice as much is enough")
		require.NotContains(t, err.Error(), "tokens")

		edit := why
		edit.From = time.Now().Add(time.Hour)
		_, err = f.store.Apply(t.Context(), edit, rules.Changes{
			Put:      []rules.Rule{perMinute("messages", "", 50), perMinute("messages", "pro", 4), perMinute("logins", "", 7)},
			Override: []rules.Override{{Limit: "messages", Key: "ana", Multiplier: 0.1}, {Limit: "messages", Key: "bob", Multiplier: 0.2}, {Limit: "messages", Key: "eve", OnPlan: "pro"}},
			Tiers:    &rules.TierSet{Tiers: []rules.Tier{{Limit: "mesages"}}},
		})
		require.NoError(t, err)
		f.load(t)
		err = f.set.Validate(known...)
		require.ErrorContains(t, err, `rule "messages", plan "": it never gives more than 7`, "which holds for an hour")
		require.ErrorContains(t, err, `override of the key "ana" of "messages": it never gives more than 5`)
		require.NotContains(t, err.Error(), "bob")
		require.ErrorContains(t, err, `override of the key "eve" of "messages": it never gives more than 4`)
		require.ErrorContains(t, err, `rules of "logins": the program does not know the limit`)
		require.ErrorContains(t, err, `tier 0, of "mesages": the program does not know the limit`)
	})

	t.Run("LeavesWhatIsPastAlone", func(t *testing.T) {
		t.Parallel()
		f := setup(t)
		_, err := f.store.Put(t.Context(), why, perMinute("messages", "", 7))
		require.NoError(t, err)
		f.exec(t, `UPDATE ratelimit.rule_changes SET from_us = from_us - 60000000`)
		store, err := rules.NewStore(f.pool, rules.StoreConfig{Lead: -1})
		require.NoError(t, err)
		_, err = store.Put(t.Context(), why, perMinute("messages", "", 8))
		require.NoError(t, err)
		f.load(t)
		require.NoError(t, f.set.Validate(known...))
	})
}
