package rules_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

func TestSetOf(t *testing.T) {
	t.Parallel()

	t.Run("AnswersAsTheFileSays", func(t *testing.T) {
		t.Parallel()
		end := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
		set, err := rules.SetOf(rules.Document{
			Rules: []rules.Rule{
				{Limit: "messages", Policy: ratelimit.TokenBucket{Rate: 3, Period: time.Minute}},
				{Limit: "messages", Plan: "pro", Policy: ratelimit.TokenBucket{Rate: 60, Period: time.Minute}},
			},
			Overrides: []rules.Override{{Limit: "messages", Key: "ada", Multiplier: 10, Until: end}},
			Tiers:     rules.TierSet{Tiers: []rules.Tier{{Limit: "messages", Key: "{user}"}}},
		})
		require.NoError(t, err)
		limit, found := set.Limit("messages")
		require.True(t, found)
		require.Equal(t, 3.0, limit.Capacity())
		_, found = set.Limit("other")
		require.False(t, found)
		require.Equal(t, "messages", set.RulingFor(messages, "free", "bob").Name())
		require.Equal(t, "messages, plan pro", set.RulingFor(messages, "pro", "bob").Name())
		require.Equal(t, "messages, override", set.RulingFor(messages, "pro", "ada").Name())

		site, err := rules.NewSite(set, rules.SiteConfig{})
		require.NoError(t, err)
		requests, err := site.Requests(rules.Attributes{User: "bob"}, nil)
		require.NoError(t, err)
		require.Len(t, requests, 1)
		require.Equal(t, 3.0, requests[0].Limit().Capacity())
	})

	t.Run("LoadsNothing", func(t *testing.T) {
		t.Parallel()
		set, err := rules.SetOf(rules.Document{})
		require.NoError(t, err)
		require.ErrorIs(t, set.Load(t.Context()), rules.ErrInvalidConfig)
		require.ErrorIs(t, set.Run(t.Context()), rules.ErrInvalidConfig)
	})

	t.Run("RefusesWhatCannotBe", func(t *testing.T) {
		t.Parallel()
		for name, file := range map[string]rules.Document{
			"rule":     {Rules: []rules.Rule{{Limit: "messages", Policy: ratelimit.TokenBucket{Rate: -1, Period: time.Minute}}}},
			"override": {Overrides: []rules.Override{{Limit: "messages", Key: "ada"}}},
			"tier":     {Tiers: rules.TierSet{Tiers: []rules.Tier{{Limit: "messages", Key: "{"}}}},
			"cost": {
				Rules: []rules.Rule{{Limit: "messages", Policy: ratelimit.TokenBucket{Rate: 1, Period: time.Minute}}},
				Tiers: rules.TierSet{Tiers: []rules.Tier{{Limit: "messages", FixedCost: 2}}},
			},
		} {
			_, err := rules.SetOf(file)
			require.ErrorIs(t, err, rules.ErrInvalid, name)
		}
	})
}
