package rules_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

func TestListSomeIsAPartOfTheTables(t *testing.T) {
	t.Parallel()
	f := setup(t)
	until := f.now(t).Add(time.Hour)
	changes := rules.Changes{Put: []rules.Rule{perMinute("a", "", 1), perMinute("b", "", 2), perMinute("b", "pro", 3)}}
	for _, key := range []string{"ada", "bob", "cy"} {
		changes.Override = append(changes.Override, rules.Override{Limit: "b", Key: key, Multiplier: 2})
		changes.Pause = append(changes.Pause, rules.Pause{Limit: "b", Key: key, Until: until})
	}
	changes.Pause = append(changes.Pause, rules.Pause{Limit: "b", Until: until})
	_, err := f.store.Apply(t.Context(), why, changes)
	require.NoError(t, err)

	list, err := f.store.ListSome(t.Context(), rules.ListQuery{Limit: "b", Key: new("bob")})
	require.NoError(t, err)
	require.Len(t, list.Rules, 2)
	require.Equal(t, []string{"bob"}, overridden(list))
	require.Equal(t, []string{"", "bob"}, paused(list), "the pause of the limit counts for the key, too")

	list, err = f.store.ListSome(t.Context(), rules.ListQuery{Most: 2})
	require.NoError(t, err)
	require.Len(t, list.Rules, 2)
	require.Equal(t, []string{"ada", "bob"}, overridden(list))
	list, err = f.store.ListSome(t.Context(), rules.ListQuery{Most: 2, After: rules.Bucket{Limit: "b", Key: "bob"}})
	require.NoError(t, err)
	require.Equal(t, []string{"cy"}, overridden(list))
	require.Equal(t, []string{"cy"}, paused(list))

	list, err = f.store.ListSome(t.Context(), rules.ListQuery{Limit: "nobody"})
	require.NoError(t, err)
	require.Empty(t, append(overridden(list), paused(list)...))
	_, err = f.store.ListSome(t.Context(), rules.ListQuery{Most: -1})
	require.ErrorIs(t, err, rules.ErrInvalid)
	for _, text := range []string{"a\x00", "\xff", strings.Repeat("k", 257)} {
		for _, query := range []rules.ListQuery{{Limit: text}, {Key: &text}, {After: rules.Bucket{Limit: text}}, {After: rules.Bucket{Limit: "a", Key: text}}} {
			_, err = f.store.ListSome(t.Context(), query)
			require.ErrorIs(t, err, rules.ErrInvalid, "%+v", query)
		}
		for _, query := range []rules.HistoryQuery{{Limit: text}, {Plan: &text}, {Key: &text}} {
			_, err = f.store.History(t.Context(), query)
			require.ErrorIs(t, err, rules.ErrInvalid, "%+v", query)
		}
	}
}

func overridden(list rules.Listing) (keys []string) {
	for _, o := range list.Overrides {
		keys = append(keys, o.Key)
	}
	return keys
}

func paused(list rules.Listing) (keys []string) {
	for _, p := range list.Pauses {
		keys = append(keys, p.Key)
	}
	return keys
}

func TestRuleAsLimit(t *testing.T) {
	t.Parallel()
	limit, err := rules.Rule{Limit: "messages", Policy: ratelimit.TokenBucket{Rate: 60, Period: time.Minute, Capacity: ratelimit.None}}.AsLimit()
	require.NoError(t, err)
	require.Equal(t, ratelimit.TokenBucket{Rate: 60, Period: time.Minute, Capacity: ratelimit.None}, limit.Policy())
	_, err = rules.Rule{Limit: "messages", Policy: ratelimit.TokenBucket{Rate: -1, Period: time.Minute}}.AsLimit()
	require.ErrorIs(t, err, rules.ErrInvalid)
}
