package rules_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/rules"
)

func TestOldEntriesAreForgotten(t *testing.T) {
	t.Parallel()
	f := setup(t)
	for _, plan := range []string{"", "pro"} {
		_, err := f.store.Put(t.Context(), why, perMinute("messages", plan, 50))
		require.NoError(t, err)
	}
	_, err := f.store.Override(t.Context(), why,
		rules.Override{Limit: "messages", Key: "ana", Multiplier: 2}, rules.Override{Limit: "messages", Key: "bob", Multiplier: 2})
	require.NoError(t, err)
	_, err = f.store.Delete(t.Context(), why, "messages", "pro")
	require.NoError(t, err)

	const day = `86400000000`
	f.exec(t, `UPDATE ratelimit.rules SET from_us = from_us - CASE of WHEN 'override' THEN 40 ELSE 31 END * `+day+`, made_us = made_us - 31 * `+day+`,
		until_us = CASE of WHEN 'override' THEN from_us - CASE key WHEN 'ana' THEN 29 ELSE 31 END * `+day+` END`)
	f.load(t)
	require.Equal(t, 1, f.events.last(t).Overrides, "that which ended 31 days ago is not loaded")
	require.Equal(t, 1, f.events.last(t).Rules)
	long := time.Now().Add(-30 * 24 * time.Hour)
	require.Equal(t, 100.0, f.capacity(t, long, messages.For("ana")), "it held until 29 days ago, and is known")
	require.Equal(t, 50.0, f.capacity(t, time.Now().Add(time.Hour), messages.For("ana")))

	_, err = f.store.Override(t.Context(), why, rules.Override{Limit: "messages", Key: "bob", Multiplier: 3})
	require.NoError(t, err)
	list, err := f.store.List(t.Context(), rules.ListQuery{})
	require.NoError(t, err)
	require.Len(t, list.Overrides, 1, "the others have ended")
}
