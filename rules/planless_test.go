package rules_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// planless remembers the plans that a Set reported.
type planless []ratelimit.PlanWithoutRule

func (p *planless) Observe(_ context.Context, event ratelimit.Event) {
	if e, ok := event.(ratelimit.PlanWithoutRule); ok {
		*p = append(*p, e)
	}
}

func TestAPlanWithoutARuleIsReportedOnce(t *testing.T) {
	t.Parallel()
	f := setup(t)
	ask := func(t *testing.T, plans ...string) []string {
		t.Helper()
		var heard planless
		set, err := rules.NewSet(f.pool, rules.Config{Observer: &heard})
		require.NoError(t, err)
		for range 2 { // also once over two loads
			require.NoError(t, set.Load(t.Context()))
			for _, plan := range plans {
				set.RulingFor(messages, plan, "ana")
				set.RulingFor(messages, plan, "bob")
			}
		}
		var told []string
		for _, e := range heard {
			require.Equal(t, messages.Name(), e.Limit)
			told = append(told, e.Plan)
		}
		return told
	}
	require.Empty(t, ask(t, "", "pro"), "the limit has no rule")

	_, err := f.store.Put(t.Context(), why, perMinute("messages", "pro", 50), perMinute("messages", "free", 5))
	require.NoError(t, err)
	set, err := rules.NewSet(f.pool, rules.Config{})
	require.NoError(t, err)
	require.Empty(t, set.Plans(), "nothing is loaded")
	require.NoError(t, set.Load(t.Context()))
	require.Equal(t, []string{"free", "pro"}, set.Plans())
	_, err = f.store.Override(t.Context(), why, rules.Override{Limit: "messages", Key: "ana", Multiplier: 3})
	require.NoError(t, err)
	require.Empty(t, ask(t, "pro", "free"))
	require.Equal(t, []string{"", "por"}, ask(t, "", "por", "pro"))
	var many []string
	for i := range 40 {
		many = append(many, fmt.Sprint("plan", i))
	}
	require.Len(t, ask(t, many...), 16, "clients may name the plan")

	_, err = f.store.Put(t.Context(), why, perMinute("messages", "", 10))
	require.NoError(t, err)
	require.Equal(t, []string{"por"}, ask(t, "", "por"), "the rule without a plan is the default")

	_, err = f.store.Override(t.Context(), why, rules.Override{Limit: "messages", Key: "bob", OnPlan: "platnum"})
	require.NoError(t, err)
	require.Equal(t, []string{"platnum"}, ask(t, "pro"), "the plan of an override has no rule")

	later := why
	later.From = time.Now().Add(time.Hour)
	_, err = f.store.Delete(t.Context(), later, "messages", "pro")
	require.NoError(t, err)
	require.NoError(t, set.Load(t.Context()))
	require.Equal(t, []string{"free", "pro"}, set.Plans(), "the end lies ahead")
	soon := why
	soon.From = time.Now().Add(time.Second)
	_, err = f.store.Delete(t.Context(), soon, "messages", "free")
	require.NoError(t, err)
	require.Eventually(t, func() bool { return set.Load(t.Context()) == nil && len(set.Plans()) == 1 }, time.Minute, 50*time.Millisecond)
}
