package rules_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

func TestListIsAPartOfTheTables(t *testing.T) {
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

	list, err := f.store.List(t.Context(), rules.ListQuery{Limit: "b", Key: new("bob")})
	require.NoError(t, err)
	require.Len(t, list.Rules, 2)
	require.Equal(t, []string{"bob"}, overridden(list))
	require.Equal(t, []string{"", "bob"}, paused(list), "the pause of the limit counts for the key, too")

	list, err = f.store.List(t.Context(), rules.ListQuery{Most: 2})
	require.NoError(t, err)
	require.Len(t, list.Rules, 2)
	require.Equal(t, []string{"ada", "bob"}, overridden(list))
	list, err = f.store.List(t.Context(), rules.ListQuery{Most: 2, After: rules.Bucket{Limit: "b", Key: "bob"}})
	require.NoError(t, err)
	require.Equal(t, []string{"cy"}, overridden(list))
	require.Equal(t, []string{"cy"}, paused(list))

	list, err = f.store.List(t.Context(), rules.ListQuery{Limit: "nobody"})
	require.NoError(t, err)
	require.Empty(t, append(overridden(list), paused(list)...))
	_, err = f.store.List(t.Context(), rules.ListQuery{Most: -1})
	require.ErrorIs(t, err, rules.ErrInvalid)
	for _, text := range []string{"a\x00", "\xff", strings.Repeat("k", 257)} {
		for _, query := range []rules.ListQuery{{Limit: text}, {Key: &text}, {After: rules.Bucket{Limit: text}}, {After: rules.Bucket{Limit: "a", Key: text}}} {
			_, err = f.store.List(t.Context(), query)
			require.ErrorIs(t, err, rules.ErrInvalid, "%+v", query)
		}
		for _, query := range []rules.HistoryQuery{{Limit: text}, {Plan: &text}, {Key: &text}} {
			_, err = f.store.History(t.Context(), query)
			require.ErrorIs(t, err, rules.ErrInvalid, "%+v", query)
		}
	}
}

// TestListHasWhatHoldsNowBesideWhatLiesAhead promises a line for each statement that holds or will, with its end.
func TestListHasWhatHoldsNowBesideWhatLiesAhead(t *testing.T) {
	t.Parallel()
	f := setup(t)
	store, now := f.immediate(t), f.now(t).Truncate(time.Second)
	tomorrow, later := now.Add(day), now.Add(7*day)
	put := func(edit rules.Edit, limit string, rate float64) {
		_, err := store.Put(t.Context(), edit, perMinute(limit, "", rate))
		require.NoError(t, err)
	}
	remove := func(limit string) {
		_, err := store.Delete(t.Context(), from(tomorrow), limit, "")
		require.NoError(t, err)
	}
	for limit, rate := range map[string]float64{"sends": 10, "goes": 7, "steady": 8, "stays": 9} {
		put(why, limit, rate)
	}
	put(from(later), "sends", 99) // which the next takes the place of
	put(from(tomorrow), "sends", 5)
	put(from(tomorrow), "new", 6)
	put(from(later), "sends", 20)
	remove("goes")
	remove("stays")
	put(why, "stays", 11)
	list, err := store.List(t.Context(), rules.ListQuery{})
	require.NoError(t, err)
	var lines []string
	for _, r := range list.Rules {
		line := r.Limit + ": " + r.String()
		if r.From.After(list.Now) {
			line += fmt.Sprintf(", in %.0f days", r.From.Sub(now).Hours()/24)
		}
		if !r.Until.IsZero() {
			line += fmt.Sprintf(", until in %.0f days", r.Until.Sub(now).Hours()/24)
		}
		lines = append(lines, line)
	}
	require.Equal(t, []string{
		"goes: 7 per minute, until in 1 days", "new: 6 per minute, in 1 days", "sends: 10 per minute, until in 1 days",
		"sends: 5 per minute, in 1 days, until in 7 days", "sends: 20 per minute, in 7 days", "stays: 11 per minute", "steady: 8 per minute",
	}, lines)
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
