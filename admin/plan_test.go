package admin_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/admin"
	"github.com/pgratelimit/pgratelimit/internal/test/admintest"
	"github.com/pgratelimit/pgratelimit/internal/test/postgrestest"
	"github.com/pgratelimit/pgratelimit/observe/refusals"
	"github.com/pgratelimit/pgratelimit/ratelimit"
	"github.com/pgratelimit/pgratelimit/rules"
)

// planned is a page of a program that counts refusals with keys, and has a rule for each of three plans.
type planned struct {
	*fixture
	counter *refusals.Counter
}

func setupPlans(t *testing.T) *planned {
	t.Helper()
	pool := postgrestest.New(t)
	counter, err := refusals.New(pool, refusals.Config{Keys: true})
	require.NoError(t, err)
	f := &planned{setupOn(t, pool, func(c *ratelimit.Config) { c.Refused = counter.Refused }), counter}
	for plan, most := range map[string]float64{"free": 10, "pro": 100, "team": 1000} {
		f.Put(t, rules.Rule{Limit: "messages", Plan: plan, Policy: ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: most}})
	}
	return f
}

// decide makes a call that takes a token, and one that is refused, and returns how many tokens are left. The refusal is
// written.
func (f *planned) decide(key, plan string) string {
	f.Helper()
	request := messages.For(key).Plan(plan)
	f.Take(f, request)
	f.Take(f, request.Cost(f.Value(f, request).Limit.Capacity()))
	over, cancel := context.WithCancel(f.Context())
	cancel()
	require.NoError(f, f.counter.Run(over)) // writes a last time
	return admin.Number(f.Value(f, request).Tokens)
}

// The page of a bucket and the list show what the program decides: on the plan of the last refusal, after a change of
// plan, with an override, and after a raise. Without a known plan they show the levels on each, and no bar.
func TestLevelsOnPlans(t *testing.T) {
	t.Parallel()
	f := setupPlans(t)
	shows := func(key, plan, left string) {
		page := f.page("key", "limit", "messages", "key", key)
		require.Contains(t, page, `<span data-figure="tokens">`+left+`</span>`, key)
		require.Contains(t, page, "as on "+plan+", last seen ", key)
		require.Contains(t, page, "plan="+plan[5:]+`" data-limit`, "the script asks for the same plan")
		require.Contains(t, f.page("limit", "name", "messages", "prefix", key), left+` <span class="of">of`, key)
	}
	for _, plan := range []string{"free", "pro", "team"} {
		shows("on "+plan, "plan "+plan, f.decide("on "+plan, plan))
	}
	shows("on free", "plan pro", f.decide("on free", "pro"))
	_, err := f.Store.Override(t.Context(), edit, rules.Override{Limit: "messages", Key: "on pro", Multiplier: 2, OnChange: ratelimit.AddTokens})
	require.NoError(t, err)
	f.Load(t)
	shows("on pro", "plan pro", f.decide("on pro", "pro"))
	f.Put(t, rules.Rule{Limit: "messages", Plan: "team", Policy: ratelimit.TokenBucket{Rate: 1, Period: ratelimit.Day, Capacity: 5000}, OnChange: ratelimit.AddTokens})
	shows("on team", "plan team", f.decide("on team", "team"))

	f.Take(t, messages.For("unseen").Plan("pro"))
	page := f.page("key", "limit", "messages", "key", "unseen")
	require.Contains(t, page, "Level on each plan")
	require.Contains(t, page, `10 <span class="of">of 10</span>`)
	require.NotContains(t, page, "data-figure")
	require.NotContains(t, f.page("limit", "name", "messages", "prefix", "unseen"), `class="meter`)
	require.Contains(t, f.page("key", "limit", "messages", "key", "unseen", "plan", "pro"), `<span data-figure="tokens">99</span>`)

	_, err = f.Limiter.Reserve(t.Context(), messages.For("reserved").Plan("free"))
	require.NoError(t, err)
	shows("reserved", "plan free", "9")
	require.Contains(t, f.get(admintest.Address("limit", "name", "messages")).body, "as on plan free, last seen")
}

// If all plans have one policy, so has the key.
func TestOneLevelOnAllPlans(t *testing.T) {
	t.Parallel()
	f := setupPlans(t)
	_, err := f.Store.Override(t.Context(), edit, rules.Override{Limit: "messages", Key: "ada", OnPlan: "pro"})
	require.NoError(t, err)
	f.Load(t)
	f.Take(t, messages.For("ada").Cost(3))
	require.Contains(t, f.page("key", "limit", "messages", "key", "ada"), `<span data-figure="tokens">97</span>`)
	f.decide("bob", "")
	require.Contains(t, f.page("key", "limit", "messages", "key", "bob"), "as on no plan, last seen")
	require.WithinDuration(t, time.Now(), f.Value(t, messages.For("bob")).AsOf, time.Hour)
}
